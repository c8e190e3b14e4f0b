# One program, and one entry of ctest, for each file in tests/cpp.

find_package(Catch2 QUIET)
if(NOT Catch2_FOUND)
  message(FATAL_ERROR "Zero: the C++ tests need Catch2: apt-get install catch2, or -DZERO_BUILD_TESTS=OFF")
endif()

# The device kernels' bodies, with arithmetic as in the CPU kernels.
add_library(zero_host_device STATIC ${ZERO_HOST_DEVICE_SOURCES})
zero_target_defaults(zero_host_device)
target_include_directories(zero_host_device PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_compile_options(zero_host_device PRIVATE -O2 -ffp-contract=off -fno-math-errno)

# The tests see internals, which libzero does not export: they link its objects.
add_library(zero_static STATIC $<TARGET_OBJECTS:zero_objects>)
zero_target_defaults(zero_static)
target_include_directories(zero_static PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(zero_static PUBLIC zero_kernels zero_host_device gomp zero::torch)
if(ZERO_CUDA)
  target_link_libraries(zero_static PUBLIC zero_cuda_kernels zero_cuda)
endif()

set(ZERO_TEST_OPTIONS -fopenmp -O1) # the code under test is in the libraries
set(ZERO_TEST_THREADS 2)
if(ZERO_SANITIZE MATCHES thread)
  set(ZERO_TEST_THREADS 1) # the sanitizer does not see OpenMP's barriers
endif()

foreach(source IN LISTS ZERO_TEST_SOURCES)
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  zero_target_defaults(${name})
  target_link_libraries(${name} PRIVATE zero_static Catch2::Catch2WithMain)
  target_compile_options(${name} PRIVATE ${ZERO_TEST_OPTIONS})
  # Torch's headers are most of a test's compilation: the first test's, for all, which
  # ccache can't tell apart.
  set_target_properties(${name} PROPERTIES CXX_COMPILER_LAUNCHER "")
  if(NOT ZERO_TEST_HEADERS)
    target_precompile_headers(
      ${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/tests/cpp/catch.h <torch/torch.h>)
    set(ZERO_TEST_HEADERS ${name})
  else()
    target_precompile_headers(${name} REUSE_FROM ${ZERO_TEST_HEADERS})
  endif()
  add_test(NAME ${name} COMMAND ${name})
  # A filter or a build that leaves no test to run is a failure, not a success.
  set_tests_properties(
    ${name}
    PROPERTIES TIMEOUT 300
               ENVIRONMENT "OMP_NUM_THREADS=${ZERO_TEST_THREADS}"
               FAIL_REGULAR_EXPRESSION "No tests ran")
endforeach()

# Objects, not an archive: registrations are linked whether or not a test names them.
add_library(fake_device OBJECT ${ZERO_FAKE_DEVICE_SOURCES})
zero_target_defaults(fake_device)
target_include_directories(fake_device PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
target_link_libraries(fake_device PRIVATE zero::torch)
foreach(name IN LISTS ZERO_FAKE_DEVICE_TESTS)
  target_link_libraries(${name} PRIVATE fake_device)
endforeach()

# The same for tests in Python. Zero itself is the library that zero_torch has loaded: the
# linker finds it by its name.
if(ZERO_BUILD_PYTHON)
  add_library(zero_fake_device MODULE ${ZERO_FAKE_DEVICE_MODULE_SOURCE})
  zero_target_defaults(zero_fake_device)
  set_target_properties(zero_fake_device PROPERTIES PREFIX "" SUFFIX ".${Python3_SOABI}.so")
  target_compile_definitions(
    zero_fake_device PRIVATE TORCH_EXTENSION_NAME=zero_fake_device
                             TORCH_API_INCLUDE_EXTENSION_H)
  target_include_directories(zero_fake_device SYSTEM PRIVATE ${Python3_INCLUDE_DIRS})
  target_link_libraries(
    zero_fake_device PRIVATE fake_device zero_host_device zero
                             ${ZERO_TORCH_ROOT}/lib/libtorch_python.so)
endif()

# Ranks that are processes.
add_executable(host_worker ${ZERO_TEST_WORKER_SOURCE})
zero_target_defaults(host_worker)
target_link_libraries(host_worker PRIVATE zero_static)
add_dependencies(test_host_processes host_worker)
target_compile_definitions(
  test_host_processes PRIVATE ZERO_HOST_WORKER="$<TARGET_FILE:host_worker>")
