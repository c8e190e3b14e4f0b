# Finds the torch that is installed for Python and describes it as the target
# zero::torch. Used by Zero's own build and, installed, by its consumers.
#
# torch's own TorchConfig.cmake is not used, since with a CUDA build of torch it
# asks for a CUDA toolkit, which neither Zero (see ZeroCuda.cmake) nor its users need. Where the consumer
# has called find_package(Torch), its target `torch` is what zero::torch links.
#
# Where torch is looked for, in this order:
#   1. the target `torch`, of find_package(Torch)
#   2. TORCH_ROOT, the folder of the Python package (variable or environment)
#   3. Torch_DIR or CMAKE_PREFIX_PATH, as torch.utils.cmake_prefix_path gives it
#   4. beside this package, when both lie in one site-packages
#   5. ZERO_TORCH_HINT, where the torch lay that this package was built with
#   6. Python3_EXECUTABLE, else python3
#
# Sets ZERO_TORCH_ROOT, ZERO_TORCH_VERSION ("2.13.0+cpu"), ZERO_TORCH_MINOR
# ("2.13"), ZERO_TORCH_CUDA ("13.0" or ""), and ZERO_TORCH_ERROR when not found.

# The root that `directory` (such a one as in 3.) belongs to, or "".
function(_zero_torch_root_above directory result)
  get_filename_component(root "${directory}/../../.." ABSOLUTE)
  if(NOT EXISTS "${root}/version.py")
    set(root "")
  endif()
  set(${result} "${root}" PARENT_SCOPE)
endfunction()

function(_zero_torch_from_python result)
  foreach(python "${Python3_EXECUTABLE}" "${Python_EXECUTABLE}" python3)
    if(NOT python)
      continue()
    endif()
    execute_process(
      COMMAND
        "${python}" -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE root
      OUTPUT_STRIP_TRAILING_WHITESPACE
      ERROR_QUIET)
    if(root)
      break()
    endif()
  endforeach()
  set(${result} "${root}" PARENT_SCOPE)
endfunction()

function(_zero_torch_locate result)
  set(root "")
  if(TARGET torch)
    get_target_property(includes torch INTERFACE_INCLUDE_DIRECTORIES)
    list(GET includes 0 include)
    get_filename_component(root "${include}/.." ABSOLUTE)
  elseif(TORCH_ROOT)
    set(root "${TORCH_ROOT}")
  elseif(DEFINED ENV{TORCH_ROOT})
    set(root "$ENV{TORCH_ROOT}")
  endif()
  if(NOT root AND Torch_DIR)
    _zero_torch_root_above("${Torch_DIR}" root)
  endif()
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
    if(NOT root AND EXISTS "${prefix}/Torch/TorchConfig.cmake")
      _zero_torch_root_above("${prefix}/Torch" root)
    elseif(NOT root AND EXISTS "${prefix}/share/cmake/Torch/TorchConfig.cmake")
      set(root "${prefix}")
    endif()
  endforeach()
  if(NOT root)
    get_filename_component(site_packages "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../../../.." ABSOLUTE)
    if(EXISTS "${site_packages}/torch/lib/libtorch.so")
      set(root "${site_packages}/torch")
    endif()
  endif()
  if(NOT root AND EXISTS "${ZERO_TORCH_HINT}/lib/libtorch.so")
    set(root "${ZERO_TORCH_HINT}")
  endif()
  if(NOT root)
    _zero_torch_from_python(root)
  endif()
  set(${result} "${root}" PARENT_SCOPE)
endfunction()

function(_zero_torch_read_version root)
  if(EXISTS "${root}/version.py")
    file(STRINGS "${root}/version.py" lines)
    foreach(line IN LISTS lines)
      if(line MATCHES "^__version__ = '(([0-9]+\\.[0-9]+)[^']*)'")
        set(ZERO_TORCH_VERSION "${CMAKE_MATCH_1}" PARENT_SCOPE)
        set(ZERO_TORCH_MINOR "${CMAKE_MATCH_2}" PARENT_SCOPE)
      elseif(line MATCHES "^cuda[^=]*= '([0-9.]+)'")
        set(ZERO_TORCH_CUDA "${CMAKE_MATCH_1}" PARENT_SCOPE)
      endif()
    endforeach()
  elseif(EXISTS "${root}/build-version") # a libtorch archive
    file(STRINGS "${root}/build-version" version LIMIT_COUNT 1)
    string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
    set(ZERO_TORCH_VERSION "${version}" PARENT_SCOPE)
    set(ZERO_TORCH_MINOR "${minor}" PARENT_SCOPE)
  endif()
endfunction()

set(ZERO_TORCH_ERROR "")
set(ZERO_TORCH_VERSION "")
set(ZERO_TORCH_MINOR "")
set(ZERO_TORCH_CUDA "")
_zero_torch_locate(ZERO_TORCH_ROOT)
if(NOT ZERO_TORCH_ROOT OR NOT EXISTS "${ZERO_TORCH_ROOT}/lib/libtorch.so")
  set(ZERO_TORCH_ERROR
      "no torch found: set TORCH_ROOT to the folder of the Python package torch, or Python3_EXECUTABLE to a Python that has it")
else()
  _zero_torch_read_version("${ZERO_TORCH_ROOT}")
endif()

if(NOT ZERO_TORCH_ERROR AND NOT TARGET zero::torch)
  add_library(zero::torch INTERFACE IMPORTED)
  if(TARGET torch)
    set_target_properties(zero::torch PROPERTIES INTERFACE_LINK_LIBRARIES torch)
  else()
    set(_zero_torch_include "${ZERO_TORCH_ROOT}/include")
    set(_zero_torch_lib "${ZERO_TORCH_ROOT}/lib")
    # libtorch.so refers to the libraries of the backends, which register
    # themselves when loaded: it has to stay though no symbol is used.
    set_target_properties(
      zero::torch
      PROPERTIES
        INTERFACE_INCLUDE_DIRECTORIES
        "${_zero_torch_include};${_zero_torch_include}/torch/csrc/api/include"
        INTERFACE_SYSTEM_INCLUDE_DIRECTORIES
        "${_zero_torch_include};${_zero_torch_include}/torch/csrc/api/include"
        INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE"
        INTERFACE_LINK_LIBRARIES
        "-Wl,--no-as-needed,${_zero_torch_lib}/libtorch.so,--as-needed;${_zero_torch_lib}/libtorch_cpu.so;${_zero_torch_lib}/libc10.so")
    unset(_zero_torch_include)
    unset(_zero_torch_lib)
  endif()
endif()
