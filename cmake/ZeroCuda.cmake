# The parts for CUDA: kernels, compiled by nvcc, and the NCCL group, compiled by the
# C++ compiler. Sets ZERO_CUDA (ON or OFF) and, when ON, makes
#   zero_cuda           what C++ sources that use CUDA are compiled and linked with
#   zero_cuda_kernels   the object files that nvcc makes of ZERO_CUDA_SOURCES
#
# No CUDA toolkit is needed: an nvcc, with the headers and libraries of torch's wheels.
# For the same reason this is neither find_package(CUDAToolkit) nor CMake's language
# CUDA, which links a program with the toolkit's libraries before it compiles anything.
#
# Where nvcc is looked for, in this order; it has to be of torch's major version:
#   1. CMAKE_CUDA_COMPILER, else CUDACXX of the environment: this one or none
#   2. PATH
#   3. CUDA_HOME, CUDA_PATH of the environment, /usr/local/cuda
#   4. the wheel nvidia-cuda-nvcc beside torch

set(ZERO_WITH_CUDA AUTO CACHE STRING "Parts for CUDA: AUTO (where torch has CUDA and nvcc is found), ON or OFF")
set_property(CACHE ZERO_WITH_CUDA PROPERTY STRINGS AUTO ON OFF)

# The folder of a toolkit that `nvcc`, which may be a script, belongs to, and its version.
function(_zero_nvcc_toolkit nvcc root version)
  execute_process(
    COMMAND "${nvcc}" --dryrun -x cu /dev/null
    OUTPUT_VARIABLE said
    ERROR_VARIABLE said
    RESULT_VARIABLE status)
  set(${root} "" PARENT_SCOPE)
  set(${version} "" PARENT_SCOPE)
  if(status EQUAL 0 AND said MATCHES "#\\$ TOP=([^\n]*)")
    get_filename_component(folder "${CMAKE_MATCH_1}" REALPATH)
    execute_process(COMMAND "${folder}/bin/nvcc" --version OUTPUT_VARIABLE said ERROR_QUIET)
    if(said MATCHES "release ([0-9]+\\.[0-9]+)")
      set(${root} "${folder}" PARENT_SCOPE)
      set(${version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# Sets ZERO_NVCC_ROOT and ZERO_NVCC_VERSION, or `problem`.
function(_zero_find_nvcc wheels problem)
  string(REGEX MATCH "^[0-9]+" major "${ZERO_TORCH_CUDA}")
  set(explicit ON)
  if(CMAKE_CUDA_COMPILER)
    set(candidates "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(candidates "$ENV{CUDACXX}")
  else()
    set(explicit OFF)
    string(REPLACE ":" ";" candidates "$ENV{PATH}")
    foreach(root "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}" /usr/local/cuda)
      if(root)
        list(APPEND candidates "${root}/bin")
      endif()
    endforeach()
    list(APPEND candidates "${wheels}/cu${major}/bin")
    list(TRANSFORM candidates APPEND /nvcc)
    list(REMOVE_DUPLICATES candidates)
  endif()
  set(others "")
  foreach(nvcc IN LISTS candidates)
    if(EXISTS "${nvcc}" AND NOT IS_DIRECTORY "${nvcc}")
      _zero_nvcc_toolkit("${nvcc}" root version)
      if(version MATCHES "^${major}\\.")
        set(ZERO_NVCC_ROOT "${root}" PARENT_SCOPE)
        set(ZERO_NVCC_VERSION "${version}" PARENT_SCOPE)
        set(${problem} "" PARENT_SCOPE)
        return()
      elseif(version)
        string(APPEND others ", ${nvcc} is of CUDA ${version}")
      else()
        string(APPEND others ", ${nvcc} does not run")
      endif()
    elseif(explicit)
      string(APPEND others ", ${nvcc} is no file")
    endif()
  endforeach()
  set(wheels_remedy "")
  if(NOT major LESS 13) # those for CUDA 12 have all but nvcc itself
    set(wheels_remedy ", or its wheels (make nvcc, or pip install")
    foreach(name nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-cccl)
      string(APPEND wheels_remedy " ${name}==${ZERO_TORCH_CUDA}.*")
    endforeach()
    string(APPEND wheels_remedy ")")
  endif()
  set(${problem}
      "expected an nvcc of CUDA ${major} for torch ${ZERO_TORCH_VERSION}, found none${others}; install CUDA ${major}${wheels_remedy}, or name nvcc with -DCMAKE_CUDA_COMPILER=FILE"
      PARENT_SCOPE)
endfunction()

# nvcc's -gencode of CMAKE_CUDA_ARCHITECTURES, which means what it means to CMake: "90"
# is machine code and PTX, "90-real" and "90-virtual" one of them.
function(_zero_cuda_architectures result)
  set(flags "")
  foreach(entry IN LISTS CMAKE_CUDA_ARCHITECTURES)
    if(entry MATCHES "^([0-9]+[af]?)(-real|-virtual)?$")
      set(number ${CMAKE_MATCH_1})
      if(NOT CMAKE_MATCH_2 STREQUAL "-virtual")
        list(APPEND flags -gencode=arch=compute_${number},code=sm_${number})
      endif()
      if(NOT CMAKE_MATCH_2 STREQUAL "-real")
        list(APPEND flags -gencode=arch=compute_${number},code=compute_${number})
      endif()
    else()
      list(APPEND flags -arch=${entry}) # native, all, all-major
    endif()
  endforeach()
  set(${result} "${flags}" PARENT_SCOPE)
endfunction()

# Whether nvcc works with this C++ compiler, these headers and architectures.
function(_zero_try_nvcc problem)
  set(${problem} "" PARENT_SCOPE)
  set(asked ${ZERO_NVCC_COMMAND} ${ZERO_NVCC_FLAGS} ${ZERO_NVCC_VERSION})
  if(ZERO_NVCC_WORKS STREQUAL "${asked}")
    return()
  endif()
  set(source ${CMAKE_CURRENT_BINARY_DIR}/zero_cuda_works.cu)
  file(WRITE ${source} "#include <cuda_bf16.h>\n__global__ void works(__nv_bfloat16* x) { *x = 1.0f; }\n")
  execute_process(
    COMMAND ${ZERO_NVCC_COMMAND} ${ZERO_NVCC_FLAGS} -c ${source} -o ${source}.o
    OUTPUT_VARIABLE said
    ERROR_VARIABLE said
    RESULT_VARIABLE status)
  if(status EQUAL 0)
    set(ZERO_NVCC_WORKS "${asked}" CACHE INTERNAL "The nvcc and the flags that have worked")
  else()
    string(STRIP "${said}" said)
    set(${problem} "${ZERO_NVCC_ROOT}/bin/nvcc cannot compile for torch ${ZERO_TORCH_VERSION}: ${said}" PARENT_SCOPE)
  endif()
endfunction()

# Sets ZERO_CUDA_INCLUDES and ZERO_CUDA_LIBRARIES, or `problem`.
function(_zero_find_cuda_parts wheels problem)
  string(REGEX MATCH "^[0-9]+" major "${ZERO_TORCH_CUDA}")
  # nvcc's own headers first: the wheels of torch have some of them, crt/ not.
  set(includes "")
  foreach(folder ${ZERO_NVCC_ROOT}/include ${wheels}/cu${major}/include
                 ${wheels}/cuda_runtime/include ${wheels}/cublas/include
                 ${wheels}/cusparse/include ${wheels}/cusolver/include ${wheels}/nccl/include)
    if(IS_DIRECTORY ${folder})
      list(APPEND includes ${folder})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES includes)
  set(missing "")
  foreach(header crt/host_config.h cuda_runtime.h cusparse.h nccl.h)
    find_file(found ${header} PATHS ${includes} /usr/include /usr/local/include NO_DEFAULT_PATH NO_CACHE)
    if(NOT found)
      string(APPEND missing " ${header}")
    endif()
    unset(found)
  endforeach()
  # The runtime that torch itself has loaded, and not a second one (-cudart static):
  # then there is one current device and one last error in a process.
  find_file(
    runtime libcudart.so.${major} libcudart.so
    PATHS ${wheels}/cu${major}/lib ${wheels}/cuda_runtime/lib ${ZERO_TORCH_ROOT}/lib
          ${ZERO_NVCC_ROOT}/lib64 ${ZERO_NVCC_ROOT}/lib
    NO_DEFAULT_PATH NO_CACHE)
  set(libraries ${ZERO_TORCH_ROOT}/lib/libtorch_cuda.so ${ZERO_TORCH_ROOT}/lib/libc10_cuda.so)
  foreach(library IN LISTS libraries)
    if(NOT EXISTS ${library})
      string(APPEND missing " ${library}")
    endif()
  endforeach()
  if(NOT runtime)
    string(APPEND missing " libcudart.so.${major}")
  endif()
  set(${problem} "" PARENT_SCOPE)
  if(missing)
    set(${problem}
        "not found:${missing}; torch's wheel for CUDA requires the nvidia-* wheels that have them: pip install --force-reinstall torch==${ZERO_TORCH_VERSION}"
        PARENT_SCOPE)
  endif()
  set(ZERO_CUDA_INCLUDES ${includes} PARENT_SCOPE)
  set(ZERO_CUDA_LIBRARIES ${libraries} ${runtime} PARENT_SCOPE)
endfunction()

macro(_zero_configure_cuda problem)
  get_filename_component(_wheels "${ZERO_TORCH_ROOT}/../nvidia" ABSOLUTE)
  if(NOT ZERO_TORCH_CUDA)
    set(${problem} "expected a torch with CUDA, got torch ${ZERO_TORCH_VERSION} in ${ZERO_TORCH_ROOT}; install a CUDA build of torch (pip install torch), or set ZERO_WITH_CUDA=OFF")
  else()
    _zero_find_nvcc(${_wheels} ${problem})
  endif()
  if(NOT ${problem})
    _zero_find_cuda_parts(${_wheels} ${problem})
  endif()
  if(NOT ${problem})
    if(NOT CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 100)
      if(ZERO_NVCC_VERSION VERSION_LESS 12.8)
        set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
      endif()
    endif()
    _zero_cuda_architectures(_architectures)
    if(CMAKE_CUDA_HOST_COMPILER)
      set(_host ${CMAKE_CUDA_HOST_COMPILER})
    else()
      set(_host ${CMAKE_CXX_COMPILER})
    endif()
    set(ZERO_NVCC_COMMAND ${ZERO_NVCC_ROOT}/bin/nvcc -ccbin ${_host})
    # Without contraction into fused multiply-adds, for the bits of the CPU's kernels.
    set(ZERO_NVCC_FLAGS
        ${_architectures} -std=c++20 -O3 -fmad=false --expt-relaxed-constexpr -DNDEBUG -DZERO_CUDA
        -Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall)
    foreach(_folder IN LISTS ZERO_CUDA_INCLUDES)
      list(APPEND ZERO_NVCC_FLAGS -isystem ${_folder})
    endforeach()
    _zero_try_nvcc(${problem})
  endif()
endmacro()

function(zero_add_cuda_kernels target)
  set(objects "")
  foreach(source IN LISTS ZERO_CUDA_SOURCES)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${target}.dir/${source}.o)
    get_filename_component(folder ${object} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    set(depfile "")
    if(CMAKE_GENERATOR MATCHES Ninja OR NOT CMAKE_VERSION VERSION_LESS 3.20)
      set(depfile DEPFILE ${object}.d)
    endif()
    add_custom_command(
      OUTPUT ${object}
      COMMAND
        ${CMAKE_CUDA_COMPILER_LAUNCHER} ${ZERO_NVCC_COMMAND} ${ZERO_NVCC_FLAGS}
        $<$<BOOL:${ZERO_WERROR}>:-Werror=all-warnings> -I${PROJECT_SOURCE_DIR} -MD -MF ${object}.d -MT
        ${object} -c ${PROJECT_SOURCE_DIR}/${source} -o ${object}
      DEPENDS ${PROJECT_SOURCE_DIR}/${source} ${depfile}
      COMMENT "Building CUDA object ${source}.o"
      COMMAND_EXPAND_LISTS VERBATIM)
    list(APPEND objects ${object})
  endforeach()
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
  add_library(${target} STATIC ${objects})
  set_target_properties(${target} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()

set(ZERO_CUDA OFF)
if(NOT ZERO_WITH_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "Zero: expected ZERO_WITH_CUDA to be AUTO, ON or OFF, got ${ZERO_WITH_CUDA}")
elseif(NOT ZERO_WITH_CUDA STREQUAL OFF)
  set(_problem "")
  _zero_configure_cuda(_problem)
  if(NOT _problem)
    set(ZERO_CUDA ON)
    string(REPLACE ";" " " _architectures "${CMAKE_CUDA_ARCHITECTURES}")
    message(STATUS "Zero with CUDA ${ZERO_NVCC_VERSION} from ${ZERO_NVCC_ROOT}, for ${_architectures}")
  elseif(ZERO_WITH_CUDA STREQUAL ON)
    message(FATAL_ERROR "Zero: ZERO_WITH_CUDA=ON: ${_problem}")
  elseif(ZERO_TORCH_CUDA)
    message(STATUS "Zero without CUDA: ${_problem}")
  else()
    message(STATUS "Zero without CUDA: torch ${ZERO_TORCH_VERSION} has none")
  endif()
endif()

if(ZERO_CUDA)
  add_library(zero_cuda INTERFACE)
  target_compile_definitions(zero_cuda INTERFACE ZERO_CUDA)
  target_include_directories(zero_cuda SYSTEM INTERFACE ${ZERO_CUDA_INCLUDES})
  target_link_libraries(zero_cuda INTERFACE ${ZERO_CUDA_LIBRARIES})
  # Where an installed libzero finds the runtime: beside torch, else where it was.
  string(REGEX MATCH "^[0-9]+" _major "${ZERO_TORCH_CUDA}")
  set(ZERO_CUDA_RPATH "$ORIGIN/../../nvidia/cu${_major}/lib" "$ORIGIN/../../nvidia/cuda_runtime/lib")
  if(NOT ZERO_RELOCATABLE)
    list(GET ZERO_CUDA_LIBRARIES -1 _runtime)
    get_filename_component(_runtime ${_runtime} DIRECTORY)
    list(APPEND ZERO_CUDA_RPATH ${_runtime})
  endif()
endif()
