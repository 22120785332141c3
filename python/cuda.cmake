# Whether the Python package's module gets the CUDA backend, when nobody says so. pyproject.toml has CMake read this at the
# end of project(); -D FQLA_ENABLE_CUDA=... and -D FQLA_CUDA_ARCHITECTURES=... (pip: -C cmake.define.NAME=VALUE) win.
#
# `pip install .` builds for the machine that it runs on: with nvcc 12.8 or later in CUDACXX, CUDA_HOME, CUDA_PATH or PATH
# and a GPU to be seen, the backend is built for the GPUs that are there, which takes a minute where code for every
# architecture takes many. Otherwise the package is for the CPU, and flash_qla.info() says why.

# NOTE: normal variables, not the cache: a build folder that is used again decides again.
function(fqla_choose_cuda enable architectures why)
    find_program(FQLA_NVCC nvcc HINTS $ENV{CUDACXX} ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin NO_CACHE)
    if(DEFINED ENV{CUDACXX} AND EXISTS "$ENV{CUDACXX}")
        set(FQLA_NVCC $ENV{CUDACXX})
    endif()
    if(NOT FQLA_NVCC)
        set(${why} "nvcc was not found when it was built" PARENT_SCOPE)
        return()
    endif()
    execute_process(COMMAND ${FQLA_NVCC} --version OUTPUT_VARIABLE text ERROR_QUIET)
    if(NOT text MATCHES "release ([0-9]+\\.[0-9]+)" OR CMAKE_MATCH_1 VERSION_LESS 12.8)
        set(${why} "nvcc is ${CMAKE_MATCH_1}, and 12.8 is needed" PARENT_SCOPE)
        return()
    endif()
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
        OUTPUT_VARIABLE text RESULT_VARIABLE failed ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${text}")
    list(REMOVE_DUPLICATES capabilities)
    set(list "")
    foreach(capability IN LISTS capabilities)
        if(capability VERSION_LESS 8.0)
            continue()
        endif()
        string(REPLACE "." "" number ${capability})
        # wgmma is in the code for 9.0a alone.
        string(REGEX REPLACE "^90$" "90a" number ${number})
        list(APPEND list ${number}-real)
    endforeach()
    if(failed OR NOT list)
        set(${why} "no GPU of compute capability 8.0 or higher was there when it was built" PARENT_SCOPE)
        return()
    endif()
    set(${enable} ON PARENT_SCOPE)
    set(${architectures} "${list}" PARENT_SCOPE)
    # Where CMake would not look by itself.
    set(CMAKE_CUDA_COMPILER ${FQLA_NVCC} PARENT_SCOPE)
endfunction()

set(FQLA_PYTHON_CUDA "" CACHE INTERNAL "Why the module has no CUDA backend")
if(NOT DEFINED CACHE{FQLA_ENABLE_CUDA})
    set(FQLA_ENABLE_CUDA OFF)
    set(why "")
    set(found "")
    fqla_choose_cuda(FQLA_ENABLE_CUDA found why)
    if(FQLA_ENABLE_CUDA AND NOT DEFINED CACHE{FQLA_CUDA_ARCHITECTURES})
        set(FQLA_CUDA_ARCHITECTURES "${found}")
    endif()
    set(FQLA_PYTHON_CUDA "${why}" CACHE INTERNAL "Why the module has no CUDA backend")
    message(STATUS "CUDA backend: ${FQLA_ENABLE_CUDA} ${FQLA_CUDA_ARCHITECTURES} ${why}")
elseif(NOT FQLA_ENABLE_CUDA)
    set(FQLA_PYTHON_CUDA "FQLA_ENABLE_CUDA was OFF when it was built" CACHE INTERNAL "Why the module has no CUDA backend")
endif()
