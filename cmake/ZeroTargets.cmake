# What Zero's own targets have in common.

function(zero_target_defaults target)
  set_target_properties(
    ${target}
    PROPERTIES CXX_STANDARD 20
               CXX_STANDARD_REQUIRED ON
               CXX_EXTENSIONS OFF
               CXX_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON)
  # Classes of torch have members that exist in debug builds only, and torch is
  # never one: without NDEBUG their layout differs from the library's.
  target_compile_definitions(${target} PRIVATE NDEBUG)
  target_compile_options(${target} PRIVATE -Wall -Wextra $<$<BOOL:${ZERO_WERROR}>:-Werror>)
  if(ZERO_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${ZERO_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
    target_link_options(${target} PRIVATE -fsanitize=${ZERO_SANITIZE})
  endif()
endfunction()

# Installed libraries find each other and torch relative to themselves. Unless
# the package has to be relocatable, torch's own place is the last resort.
function(zero_set_rpath target)
  set(rpath ${ARGN})
  if(NOT ZERO_RELOCATABLE)
    list(APPEND rpath ${ZERO_TORCH_ROOT}/lib)
  endif()
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${rpath}")
  target_link_options(${target} PRIVATE -Wl,--enable-new-dtags)
endfunction()

# The kernels: one source compiled once for each instruction set, and the choice
# between them at run time. A static library, linked into libzero and the tests.
function(zero_add_kernels target)
  add_library(${target} STATIC ${ZERO_KERNEL_SOURCES})
  zero_target_defaults(${target})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target} PUBLIC zero::torch)
  # Results must not depend on the instruction set: no contraction into fused
  # multiply-adds. The other two flags let loops vectorize, and keep values.
  set(flags -O3 -fopenmp -ffp-contract=off -fno-math-errno -fno-trapping-math)
  target_compile_options(${target} PRIVATE ${flags})

  set(sets generic)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
    list(APPEND sets avx2 avx512)
  endif()
  set(flags_generic "")
  set(flags_avx2 -mavx2 -mfma -mf16c)
  set(flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma)
  foreach(set IN LISTS sets)
    set(variant ${target}_${set})
    add_library(${variant} OBJECT ${ZERO_KERNEL_VARIANT_SOURCE})
    zero_target_defaults(${variant})
    target_include_directories(${variant} PRIVATE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${variant} PRIVATE zero::torch)
    target_compile_definitions(${variant} PRIVATE ZERO_KERNELS_NAMESPACE=${set})
    target_compile_options(${variant} PRIVATE ${flags} ${flags_${set}})
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${variant}>)
  endforeach()
endfunction()
