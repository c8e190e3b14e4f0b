// The engine. Every method lets go of the GIL before the engine takes its mutex:
// a thread that took them in the other order would deadlock.

#include "engine_class.h"

#include <pybind11/typing.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <zero/comm/groups.h>

namespace zero::bindings {
namespace {

using Parameters = std::vector<std::tuple<std::string, at::Tensor, int64_t, int64_t, bool>>;
using Buffers = std::vector<std::pair<std::string, at::Tensor>>;

std::vector<NamedParameter> named(Parameters parameters) {
  std::vector<NamedParameter> result;
  result.reserve(parameters.size());
  for (auto& [name, tensor, group, unit, keeps_dtype] : parameters) {
    result.push_back(
        {.name = std::move(name),
         .tensor = std::move(tensor),
         .group = group,
         .unit = unit,
         .keeps_dtype = keeps_dtype});
  }
  return result;
}

std::shared_ptr<Engine> create(
    Parameters parameters,
    Buffers buffers,
    const Options& options,
    const std::optional<Ranks>& group,
    std::vector<std::string> unit_names,
    const py::object& materialize,
    std::vector<int64_t> order) {
  const auto channels = comm::communicators_of(
      group.value_or(Ranks()),
      options.timeout,
      options.stage == 3 ? 2 : 1,
      options.transport,
      options.registered_buffers);
  Units units{
      .names = std::move(unit_names), .gathers = channels.back(), .order = std::move(order)};
  if (!materialize.is_none()) {
    units.materialize = [&materialize](int64_t unit) {
      const py::gil_scoped_acquire acquire;
      return materialize(unit).cast<std::vector<at::Tensor>>();
    };
  }
  return Engine::create(
      named(std::move(parameters)), std::move(buffers), options, channels.front(), units);
}

py::dict bytes_of(const memory::Usage& usage) {
  py::dict result;
  result["parameters"] = usage.parameters;
  result["gradients"] = usage.gradients;
  result["optimizer_state"] = usage.optimizer_state;
  result["buffers"] = usage.buffers;
  return result;
}

py::dict bytes_of(const comm::Traffic& traffic) {
  py::dict result;
  result["reduce_scatter"] = traffic.reduce_scatter.bytes;
  result["all_gather"] = traffic.all_gather.bytes;
  result["all_reduce"] = traffic.all_reduce.bytes;
  result["broadcast"] = traffic.broadcast.bytes;
  return result;
}

py::dict by_group(const Engine::Report& report) {
  py::dict theory;
  theory["shard"] = report.theory_traffic - report.theory_replicate_traffic;
  theory["replicate"] = report.theory_replicate_traffic;
  py::dict result;
  result["shard"] = bytes_of(report.group_traffic.shard);
  result["replicate"] = bytes_of(report.group_traffic.replicate);
  result["theory"] = theory;
  return result;
}

// Bytes, by name; nested.
using Numbers = py::typing::Dict<py::str, py::object>;

Numbers report(const Engine& engine) {
  Engine::Report report;
  {
    py::gil_scoped_release release;
    report = engine.report();
  }
  py::dict theory;
  theory["held"] = bytes_of(report.theory_held);
  theory["traffic"] = report.theory_traffic;
  Numbers result;
  result["held"] = bytes_of(report.held);
  result["peak"] = bytes_of(report.peak);
  result["traffic"] = bytes_of(report.traffic);
  result["theory"] = theory;
  result["groups"] = by_group(report);
  result["replicas"] = report.replicas;
  result["steps"] = report.steps;
  result["nonfinite_steps"] = report.nonfinite_steps;
  result["nonfinite_parameter"] = report.nonfinite_parameter;
  result["padding"] = report.padding;
  result["transport"] = report.transport;
  return result;
}

void bind_identity(EngineClass& engine) {
  engine
      .def_static(
          "create",
          &create,
          py::arg("parameters"),
          py::arg("buffers"),
          py::arg("options"),
          py::arg("group"),
          py::arg("unit_names") = std::vector<std::string>{""},
          py::arg("materialize") = py::none(),
          py::arg("order") = std::vector<int64_t>{},
          NoGil(),
          "[collective] The engine of `parameters` (name, tensor, group index, unit index), with\n"
          "rank 0's values of them and of `buffers`, over private groups with the members of\n"
          "`group` (None: one rank) or of Groups. `materialize(unit)` gives the parameters of a\n"
          "unit values, in the `order` of units given. Raises before any change when ranks "
          "differ,\n"
          "naming the first difference.")
      .def(
          "add_parameters",
          [](Engine& self, Parameters parameters) {
            self.add_parameters(named(std::move(parameters)));
          },
          py::arg("parameters"),
          NoGil(),
          "[collective] More parameters, in a new group.")
      .def_property_readonly("options", [](const Engine& self) { return self.options(); })
      .def_property_readonly("rank", &Engine::rank)
      .def_property_readonly("world_size", &Engine::world_size)
      .def("parameter_count", &Engine::parameter_count, NoGil(), "How many parameters it manages.")
      .def(
          "parameter",
          [](const Engine& self, int64_t index) {
            const NamedParameter& parameter = self.parameter(index);
            return std::make_tuple(parameter.name, parameter.tensor, parameter.group);
          },
          py::arg("index"),
          NoGil(),
          "(name, tensor, group index) of a parameter.")
      .def(
          "index_of",
          &Engine::index_of,
          py::arg("parameter"),
          NoGil(),
          "The index of a managed parameter; -1 for any other tensor.");
}

void bind_training(EngineClass& engine) {
  engine
      .def(
          "set_gradient_stand_ins",
          &Engine::set_gradient_stand_ins,
          py::arg("stand_ins"),
          NoGil(),
          "Stages 1 to 3: what `.grad` is once it was reduced, by parameter.")
      .def(
          "set_requires_gradient_sync",
          &Engine::set_requires_gradient_sync,
          py::arg("sync"),
          NoGil(),
          "False: backward accumulates without traffic.")
      .def("requires_gradient_sync", &Engine::requires_gradient_sync, NoGil())
      .def(
          "step",
          &Engine::step,
          py::arg("rules"),
          NoGil(),
          "[collective] One step by native rules, one rule a group. False: left out on all ranks\n"
          "for a non-finite gradient.")
      .def(
          "begin_step",
          [](Engine& self, const py::bytes& hyperparameters) {
            const std::string text = hyperparameters;
            const py::gil_scoped_release release;
            return self.begin_step(text);
          },
          py::arg("hyperparameters") = py::bytes(),
          "[collective] Opens a step by somebody else's rule: shard_gradient() is final. False: "
          "it is\nleft out on all ranks for a non-finite gradient, and not to be closed.")
      .def(
          "end_step",
          &Engine::end_step,
          NoGil(),
          "[collective] Closes it: what was written to shard_parameter() goes to all ranks.")
      .def(
          "stepping",
          &Engine::stepping,
          NoGil(),
          "Indices of the parameters that have a gradient and a part on this rank.")
      .def(
          "shard_parameter",
          &Engine::shard_parameter,
          py::arg("index"),
          NoGil(),
          "A one-dimensional view of this rank's part of a parameter, of its fp32 master where it\n"
          "has one; empty without a part.")
      .def(
          "shard_gradient",
          &Engine::shard_gradient,
          py::arg("index"),
          NoGil(),
          "A one-dimensional view of this rank's part of the reduced gradient.")
      .def(
          "stepping_gradient",
          &Engine::stepping_gradient,
          py::arg("index"),
          NoGil(),
          "shard_gradient() in the dtype of shard_parameter(): a copy where it has another.")
      .def(
          "synchronize",
          &Engine::synchronize,
          NoGil(),
          "[collective] Reduces what backward left unreduced and waits for every transfer.")
      .def(
          "wait_parameters",
          &Engine::wait_parameters,
          NoGil(),
          "Waits until the parameters of the last step have arrived. Starts no transfer.");
}

void bind_units(EngineClass& engine) {
  engine
      .def(
          "enter_unit",
          &Engine::enter_unit,
          py::arg("unit"),
          NoGil(),
          "[collective] Before a forward of a unit's module: gathers it.")
      .def("leave_unit", &Engine::leave_unit, py::arg("unit"), NoGil(), "After that forward.")
      .def(
          "enter_forward",
          &Engine::enter_forward,
          NoGil(),
          "From here operations gather the sharded parameters that they read.")
      .def("leave_forward", &Engine::leave_forward, NoGil(), "Until here.")
      .def(
          "hold",
          &Engine::hold,
          py::arg("indices"),
          py::arg("writable"),
          NoGil(),
          "[collective] Makes the units of parameters whole.")
      .def(
          "let_go",
          &Engine::let_go,
          py::arg("indices"),
          py::arg("writable"),
          NoGil(),
          "Ends a hold() with the same arguments. [collective] when writable: rank 0's values go\n"
          "to all ranks.")
      .def("unshard_all", &Engine::unshard_all, NoGil(), "[collective] Makes all units whole.")
      .def("reshard_all", &Engine::reshard_all, NoGil(), "Ends unshard_all().")
      .def(
          "begin_load",
          &Engine::begin_load,
          py::arg("index"),
          NoGil(),
          "Gives a parameter memory that may be written; end_load() keeps this rank's part.")
      .def("end_load", &Engine::end_load, py::arg("index"), NoGil())
      .def(
          "release_parameters",
          &Engine::release_parameters,
          NoGil(),
          "[collective] Makes the parameters ordinary whole tensors again.")
      .def("unit_names", &Engine::unit_names, NoGil(), "The root's is empty.");
}

void bind_inspection(EngineClass& engine) {
  engine
      .def(
          "has_master",
          &Engine::has_master,
          py::arg("index"),
          "Whether the parameter computes in 16 bits and has an fp32 master.")
      .def(
          "is_flat",
          &Engine::is_flat,
          py::arg("index"),
          "Whether it lies in flat buffers; what was frozen when it came does not, below stage 3.")
      .def(
          "step_count",
          &Engine::step_count,
          py::arg("index"),
          "Steps of native rules that it has taken.")
      .def(
          "is_trainable",
          &Engine::is_trainable,
          py::arg("index"),
          "Whether it has a gradient and state: was not frozen, or a backward reached it since.")
      .def(
          "load_master",
          &Engine::load_master,
          py::arg("index"),
          py::arg("whole"),
          NoGil(),
          "The master, where there is one, from a whole tensor, and the parameter from that. No\n"
          "communication.")
      .def(
          "join_full_parameter",
          &Engine::join_full_parameter,
          py::arg("index"),
          NoGil(),
          "Takes part in other ranks' full_parameter(), without a whole one here.")
      .def(
          "full_parameter",
          &Engine::full_parameter,
          py::arg("index"),
          NoGil(),
          "[collective at stages 1 to 3] The whole parameter.")
      .def(
          "full_gradient",
          [](Engine& self, int64_t index) -> std::optional<at::Tensor> {
            at::Tensor gradient = self.full_gradient(index);
            return gradient.defined() ? std::make_optional(gradient) : std::nullopt;
          },
          py::arg("index"),
          NoGil(),
          "[collective at stages 1 to 3] The whole reduced gradient; None when there is none.")
      .def(
          "full_state",
          &Engine::full_state,
          py::arg("index"),
          NoGil(),
          "[collective at stages 1 to 3] Whole state of a native rule, by name; empty before a "
          "step.")
      .def(
          "load_full_state",
          &Engine::load_full_state,
          py::arg("index"),
          py::arg("state"),
          NoGil(),
          "Sets the state of a native rule from whole tensors; an empty dict clears it.")
      .def(
          "unshard",
          &Engine::unshard,
          py::arg("index"),
          py::arg("shard"),
          NoGil(),
          "[collective at stages 1 to 3] A tensor of the shape of shard_parameter() made whole.")
      .def(
          "shard",
          &Engine::shard,
          py::arg("index"),
          py::arg("whole"),
          NoGil(),
          "This rank's part of a whole tensor of the parameter's shape, as a copy.")
      .def(
          "account_foreign_state",
          &Engine::account_foreign_state,
          py::arg("bytes"),
          NoGil(),
          "Bytes of optimizer state that a rule outside the engine holds on this rank.")
      .def("report_table", &Engine::report_table, NoGil(), "The report as an aligned table.")
      .def(
          "report",
          &report,
          "What is held, was held at most and was sent, in bytes, beside theory.");
}

} // namespace

void init_engine(py::module_& module) {
  EngineClass engine(module, "Engine", "What carries a model through training; one per model.");
  bind_identity(engine);
  bind_training(engine);
  bind_gradients(engine);
  bind_join(engine);
  bind_units(engine);
  bind_inspection(engine);
  bind_agreement(engine);
}

} // namespace zero::bindings
