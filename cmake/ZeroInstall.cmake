# The tree below the prefix, which for a wheel is the package zero_torch itself.

include(CMakePackageConfigHelpers)
set(ZERO_CMAKE_DIR share/cmake/Zero)

install(TARGETS zero EXPORT ZeroTargets LIBRARY DESTINATION lib)
install(
  DIRECTORY zero
  DESTINATION include
  FILES_MATCHING
  PATTERN "*.h"
  PATTERN gloo_shim EXCLUDE)
install(
  EXPORT ZeroTargets
  NAMESPACE zero::
  DESTINATION ${ZERO_CMAKE_DIR})

if(ZERO_RELOCATABLE)
  set(ZERO_TORCH_HINT "")
else()
  set(ZERO_TORCH_HINT "${ZERO_TORCH_ROOT}")
endif()
configure_package_config_file(cmake/ZeroConfig.cmake.in ZeroConfig.cmake INSTALL_DESTINATION ${ZERO_CMAKE_DIR})
write_basic_package_version_file(ZeroConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ZeroConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/ZeroConfigVersion.cmake
              cmake/ZeroTorch.cmake DESTINATION ${ZERO_CMAKE_DIR})

if(ZERO_BUILD_PYTHON)
  if(ZERO_TORCH_CUDA)
    set(ZERO_BUILD_INFO_CUDA "\"${ZERO_TORCH_CUDA}\"")
  else()
    set(ZERO_BUILD_INFO_CUDA None)
  endif()
  set(ZERO_BUILD_INFO_ARCHITECTURES None)
  set(ZERO_BUILD_INFO_NVCC None)
  if(ZERO_CUDA)
    string(REPLACE ";" " " ZERO_BUILD_INFO_ARCHITECTURES "\"${CMAKE_CUDA_ARCHITECTURES}\"")
    set(ZERO_BUILD_INFO_NVCC "\"${ZERO_NVCC_VERSION}\"")
  endif()
  configure_file(cmake/_build_info.py.in _build_info.py @ONLY)
  install(TARGETS zero_python LIBRARY DESTINATION .)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_build_info.py DESTINATION .)
endif()
