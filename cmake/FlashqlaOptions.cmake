# Options, language level and warnings for every room.

option(BUILD_SHARED_LIBS "Build libflashqla as a shared library" ON)
option(FQLA_ENABLE_CPU "Build the SIMD CPU backend (needs Google Highway and OpenMP)" ON)
option(FQLA_ENABLE_CUDA "Build the CUDA backend (needs the CUDA toolkit, 12.8 or later; no GPU)" OFF)
# Machine code for every architecture there is, and PTX of the oldest for those to come.
set(FQLA_CUDA_ARCHITECTURES "80;86-real;89-real;90a-real;100-real;120-real" CACHE STRING
    "GPU architectures to compile for, as in CMAKE_CUDA_ARCHITECTURES")
option(FQLA_EMULATE_CUDA "Tests: run the CUDA backend's kernels on an emulated GPU (tests/emulator)" OFF)
option(FQLA_BUILD_CLI "Build the flashqla command line tool (needs CLI11)" ${PROJECT_IS_TOP_LEVEL})
option(FQLA_BUILD_TESTS "Build the tests (needs GoogleTest)" ${PROJECT_IS_TOP_LEVEL})
option(FQLA_BUILD_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(FQLA_BUILD_BENCH "Build the benchmark against other libraries" OFF)
option(FQLA_BUILD_PYTHON "Build the module of the Python package (needs the apache-tvm-ffi package; pip sets it)" OFF)
option(FQLA_WERROR "Treat warnings as errors" OFF)
set(FQLA_SANITIZE "" CACHE STRING "Sanitizers for everything, such as address,undefined or thread")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 99)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Without -Wpedantic for the host side of .cu files: the code that nvcc puts around it is not pedantic.
add_compile_options(
    "$<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wno-unused-parameter>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow,-Wno-unused-parameter>")
if(FQLA_WERROR)
    add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-Werror>" "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
endif()
if(FQLA_SANITIZE)
    add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${FQLA_SANITIZE};-fno-omit-frame-pointer;-g>")
    add_link_options(-fsanitize=${FQLA_SANITIZE})
endif()

if(FQLA_ENABLE_CUDA AND NOT FQLA_EMULATE_CUDA)
    set(CMAKE_CUDA_ARCHITECTURES ${FQLA_CUDA_ARCHITECTURES})
    include(CheckLanguage)
    check_language(CUDA)
    if(NOT CMAKE_CUDA_COMPILER)
        message(FATAL_ERROR "FQLA_ENABLE_CUDA is ON, but no CUDA compiler was found; put nvcc into PATH, set CUDACXX, "
                            "or leave FQLA_ENABLE_CUDA off")
    endif()
    enable_language(CUDA)
    # NOTE: CMake 3.25 does not know that nvcc has C++20.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    endif()
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
    find_package(CUDAToolkit REQUIRED)
endif()
