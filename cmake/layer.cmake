# kvs_layer(num SOURCES fmt.c kvfmt.c DEPS base [EXTERN MPI::MPI_C])
#   The static library kvs_num of the folder src/num. DEPS are lower layers by their short name.
#   EXTERN are libraries from outside the project; the product links them too.
# kvs_simd(attn_avx2.c "-mavx2 -mfma -mf16c")
#   Flags for one file of the current folder. Such a file may define no external inline function:
#   the linker could keep the wide copy for a machine that lacks it.
define_property(GLOBAL PROPERTY KVS_LAYERS)
define_property(GLOBAL PROPERTY KVS_EXTERN)

function(kvs_layer name)
    cmake_parse_arguments(L "" "" "SOURCES;DEPS;EXTERN" ${ARGN})
    if(L_UNPARSED_ARGUMENTS)
        message(FATAL_ERROR "kvs_layer(${name}): unknown arguments ${L_UNPARSED_ARGUMENTS}")
    endif()
    add_library(kvs_${name} STATIC ${L_SOURCES})
    target_include_directories(kvs_${name} PUBLIC
        "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include" "${KVS_GEN_DIR}")
    target_link_libraries(kvs_${name} PUBLIC kvs_flags)
    foreach(dep ${L_DEPS})
        if(NOT TARGET kvs_${dep})
            message(FATAL_ERROR "kvs_layer(${name}): the layer ${dep} is absent or not lower")
        endif()
        target_link_libraries(kvs_${name} PUBLIC kvs_${dep})
    endforeach()
    if(L_EXTERN)
        target_link_libraries(kvs_${name} PUBLIC ${L_EXTERN})
        set_property(GLOBAL APPEND PROPERTY KVS_EXTERN ${L_EXTERN})
    endif()
    set_property(GLOBAL APPEND PROPERTY KVS_LAYERS ${name})
endfunction()

function(kvs_simd file flags)
    set_property(SOURCE "${file}" APPEND_STRING PROPERTY COMPILE_FLAGS " ${flags}")
endfunction()
