# Every source, by target. A test compares these lists with the folders.

set(ZERO_SOURCES
    zero/autograd/accumulate_hooks.cpp
    zero/autograd/backward_end.cpp
    zero/autograd/operation_traits.cpp
    zero/autograd/use_guard.cpp
    zero/comm/arguments.cpp
    zero/comm/blocking.cpp
    zero/comm/collectives.cpp
    zero/comm/environment.cpp
    zero/comm/failure_board.cpp
    zero/comm/gloo_group.cpp
    zero/comm/group_transport.cpp
    zero/comm/host_channel.cpp
    zero/comm/host_group.cpp
    zero/comm/host_list.cpp
    zero/comm/host_memory.cpp
    zero/comm/host_process.cpp
    zero/comm/host_segment.cpp
    zero/comm/host_transport.cpp
    zero/comm/init.cpp
    zero/comm/local_communicator.cpp
    zero/comm/make_communicator.cpp
    zero/comm/meeting.cpp
    zero/comm/operation_header.cpp
    zero/comm/operation_queue.cpp
    zero/comm/peer_exchange.cpp
    zero/comm/queued_communicator.cpp
    zero/comm/reduce_elements.cpp
    zero/layout/flat_layout.cpp
    zero/layout/units.cpp
    zero/memory/account.cpp
    zero/memory/flat_buffer.cpp
    zero/memory/slab_pool.cpp
    zero/memory/slab_view.cpp
    zero/nn/module_tree.cpp
    zero/optim/engine.cpp
    zero/optim/engine_build.cpp
    zero/optim/engine_inspect.cpp
    zero/optim/engine_recovery.cpp
    zero/optim/engine_report.cpp
    zero/optim/engine_units.cpp
    zero/optim/gradient_norm.cpp
    zero/optim/native_step.cpp
    zero/optim/runs.cpp
    zero/optim/sharder.cpp
    zero/optim/zero_optimizer.cpp
    zero/options.cpp
    zero/sharding/agreement.cpp
    zero/sharding/gradient_storage.cpp
    zero/sharding/gradients.cpp
    zero/sharding/gradients_end.cpp
    zero/sharding/optimizer_state.cpp
    zero/sharding/parameter_gather.cpp
    zero/sharding/parameter_table.cpp
    zero/sharding/parameters.cpp
    zero/sharding/parameters_on_use.cpp
    zero/sharding/parameters_whole.cpp
    zero/sharding/unit_schedule.cpp)

set(ZERO_KERNEL_SOURCES
    csrc/kernels/dispatch.cpp
    csrc/kernels/exact_sum.cpp)
# Compiled once for each instruction set.
set(ZERO_KERNEL_VARIANT_SOURCE csrc/kernels/kernels_impl.cpp)

set(ZERO_BINDING_SOURCES
    csrc/bindings/comm.cpp
    csrc/bindings/engine.cpp
    csrc/bindings/layout.cpp
    csrc/bindings/module.cpp
    csrc/bindings/options.cpp
    csrc/bindings/unit_hook.cpp)

set(ZERO_TEST_SOURCES
    tests/cpp/test_comm.cpp
    tests/cpp/test_comm_faults.cpp
    tests/cpp/test_engine.cpp
    tests/cpp/test_host.cpp
    tests/cpp/test_host_recovery.cpp
    tests/cpp/test_host_processes.cpp
    tests/cpp/test_kernels.cpp
    tests/cpp/test_launch_environment.cpp
    tests/cpp/test_layout.cpp
    tests/cpp/test_memory.cpp
    tests/cpp/test_parity.cpp
    tests/cpp/test_stage3.cpp
    tests/cpp/test_units.cpp)
# The program that test_host_processes starts.
set(ZERO_TEST_WORKER_SOURCE tests/cpp/host_worker.cpp)
