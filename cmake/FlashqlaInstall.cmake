# cmake --install: the library, its headers, find_package(flashqla) and pkg-config flashqla. All of it may be moved.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/flashqla)

install(TARGETS flashqla fqla_include EXPORT flashqla
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/flashqla DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT flashqla NAMESPACE flashqla:: FILE flashqlaTargets.cmake DESTINATION ${package_dir})

# What a static library asks of those who link it; a shared one has it inside.
set(FQLA_NEEDS_CPU_LIBRARIES OFF)
if(TARGET fqla_cpu AND NOT BUILD_SHARED_LIBS)
    set(FQLA_NEEDS_CPU_LIBRARIES ON)
endif()
set(FQLA_NEEDS_CUDA_RUNTIME OFF)
if(TARGET fqla_cuda AND NOT BUILD_SHARED_LIBS)
    set(FQLA_NEEDS_CUDA_RUNTIME ON)
endif()

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/flashqlaConfig.cmake.in
    ${PROJECT_BINARY_DIR}/flashqlaConfig.cmake INSTALL_DESTINATION ${package_dir})
# Before 1.0 a minor version may break what compiles.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/flashqlaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/flashqlaConfig.cmake ${PROJECT_BINARY_DIR}/flashqlaConfigVersion.cmake
    DESTINATION ${package_dir})

# ------------------------------------------------------------------------------------------------------- pkg-config

set(pc_cflags "")
set(pc_requires_private "")
set(pc_libs_private "")
if(NOT BUILD_SHARED_LIBS)
    set(pc_cflags " -DFQLA_STATIC")
    if(FQLA_NEEDS_CPU_LIBRARIES)
        set(pc_requires_private libhwy)
        foreach(name IN LISTS OpenMP_CXX_LIB_NAMES)
            string(APPEND pc_libs_private " -l${name}")
        endforeach()
    endif()
    if(FQLA_NEEDS_CUDA_RUNTIME)
        string(APPEND pc_libs_private " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -lpthread -ldl")
    endif()
    # The C++ runtime, for programs that a C compiler links.
    foreach(name IN LISTS CMAKE_CXX_IMPLICIT_LINK_LIBRARIES)
        if(name MATCHES "^(stdc\\+\\+|c\\+\\+|m)$")
            string(APPEND pc_libs_private " -l${name}")
        endif()
    endforeach()
endif()

# From the folder of the .pc file to the prefix, so that the installed tree may be moved.
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
if(IS_ABSOLUTE ${CMAKE_INSTALL_LIBDIR})
    set(pc_prefix ${CMAKE_INSTALL_PREFIX})
else()
    file(RELATIVE_PATH pc_up /prefix/${pc_dir} /prefix)
    string(REGEX REPLACE "/$" "" pc_up ${pc_up})
    set(pc_prefix "\${pcfiledir}/${pc_up}")
endif()
foreach(kind IN ITEMS LIBDIR INCLUDEDIR)
    if(IS_ABSOLUTE ${CMAKE_INSTALL_${kind}})
        set(pc_${kind} ${CMAKE_INSTALL_${kind}})
    else()
        set(pc_${kind} "\${prefix}/${CMAKE_INSTALL_${kind}}")
    endif()
endforeach()
configure_file(${PROJECT_SOURCE_DIR}/cmake/flashqla.pc.in ${PROJECT_BINARY_DIR}/flashqla.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/flashqla.pc DESTINATION ${pc_dir})
