# Reads the dynamic symbol table: only the API leaves the library, and all of the C API does.
# -DNM= -DLIBRARY= -DINCLUDE=
cmake_minimum_required(VERSION 3.25)

# Names stay mangled: not every nm can demangle a name that carries a version.
execute_process(COMMAND ${NM} --dynamic --defined-only ${LIBRARY} OUTPUT_VARIABLE table COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" lines "${table}")

file(READ ${INCLUDE}/flashqla.h header)
string(REGEX MATCHALL "FQLA_API [^;]*;" declarations "${header}")
set(c_api "")
foreach(declaration IN LISTS declarations)
    string(REGEX MATCH "(fqla_[a-z_]+)\\(" unused "${declaration}")
    list(APPEND c_api ${CMAKE_MATCH_1})
endforeach()

# _ZN 8flashqla 7forward E...: length and name, and the members of the two exported classes
set(cpp_api Plan Status tensor size_of name_of forward backward decode commit version abi_version backend_names
    system_info)

set(found "")
set(strangers "")
foreach(line IN LISTS lines)
    if(NOT line MATCHES "^[0-9a-f]+ +([A-Za-z]) +([^@]+)" OR CMAKE_MATCH_1 STREQUAL "A")
        continue()
    endif()
    set(symbol ${CMAKE_MATCH_2})
    if(symbol IN_LIST c_api)
        list(APPEND found ${symbol})
        continue()
    endif()
    set(name "")
    if(symbol MATCHES "^_ZNK?8flashqla([0-9]+)(.*)$")
        string(SUBSTRING ${CMAKE_MATCH_2} 0 ${CMAKE_MATCH_1} name)
    endif()
    if(NOT name IN_LIST cpp_api)
        list(APPEND strangers ${symbol})
    endif()
endforeach()

set(missing ${c_api})
list(REMOVE_ITEM missing ${found})
if(strangers)
    list(JOIN strangers "\n  " text)
    message(FATAL_ERROR "symbols that are no part of the API leave the library:\n  ${text}")
endif()
list(LENGTH c_api count)
if(missing OR count LESS 15)
    message(FATAL_ERROR "of ${count} C functions in flashqla.h these are not exported: ${missing}")
endif()
message(STATUS "${count} C functions and the C++ API are exported, nothing else")
