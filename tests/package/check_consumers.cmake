# Installs the library, moves the installed tree, and builds and runs a C and a C++ project against it, through
# find_package and through pkg-config.
# -DBUILD= -DSOURCE= -DWORK= -DCONFIG= -DSHARED= -DGENERATOR= -DC_COMPILER= -DCXX_COMPILER= -DPKG_CONFIG= -DSANITIZE=
cmake_minimum_required(VERSION 3.25)

function(run)
    execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
    if(NOT code EQUAL 0)
        list(JOIN ARGN " " command)
        message(FATAL_ERROR "${command}\nended with ${code}:\n${output}")
    endif()
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --config ${CONFIG} --prefix ${WORK}/installed)
file(RENAME ${WORK}/installed ${WORK}/moved)
set(prefix ${WORK}/moved)

file(GLOB_RECURSE pc_file ${prefix}/flashqla.pc)
get_filename_component(pc_dir ${pc_file} DIRECTORY)
get_filename_component(lib_dir ${pc_dir} DIRECTORY)
set(ENV{LD_LIBRARY_PATH} ${lib_dir}:$ENV{LD_LIBRARY_PATH})
set(sanitize "")
if(SANITIZE)
    set(sanitize -fsanitize=${SANITIZE})
endif()

foreach(language IN ITEMS c cpp)
    run(${CMAKE_COMMAND} -S ${SOURCE}/${language} -B ${WORK}/${language} -G ${GENERATOR}
        -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_BUILD_TYPE=${CONFIG} -DCMAKE_C_COMPILER=${C_COMPILER}
        -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DFLASHQLA_IS_SHARED=${SHARED}
        -DCMAKE_C_FLAGS=${sanitize} -DCMAKE_CXX_FLAGS=${sanitize})
    run(${CMAKE_COMMAND} --build ${WORK}/${language} --config ${CONFIG})
    find_program(consumer_${language} consumer PATHS ${WORK}/${language} ${WORK}/${language}/${CONFIG} NO_DEFAULT_PATH
        REQUIRED)
    run(${consumer_${language}})
endforeach()
message(STATUS "find_package: C and C++ projects built and run")

if(NOT PKG_CONFIG)
    message(STATUS "pkg-config: not found, its half of this test is left out")
    return()
endif()
set(ENV{PKG_CONFIG_PATH} ${pc_dir}:$ENV{PKG_CONFIG_PATH})
set(static "")
if(NOT SHARED)
    set(static --static)
endif()
run(${PKG_CONFIG} --validate flashqla)
execute_process(COMMAND ${PKG_CONFIG} ${static} --cflags --libs flashqla OUTPUT_VARIABLE flags
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT flags MATCHES "moved")
    message(FATAL_ERROR "pkg-config does not follow the moved tree: ${flags}")
endif()
separate_arguments(flags UNIX_COMMAND "${flags}")
run(${C_COMPILER} -std=c99 ${sanitize} ${SOURCE}/c/main.c -o ${WORK}/pc_c ${flags})
run(${WORK}/pc_c)
run(${CXX_COMPILER} -std=c++20 ${sanitize} ${SOURCE}/cpp/main.cpp -o ${WORK}/pc_cpp ${flags})
run(${WORK}/pc_cpp)
message(STATUS "pkg-config: C and C++ programs built and run")
