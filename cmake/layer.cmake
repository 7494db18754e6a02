# kvs_layer(num SOURCES fmt.c kvfmt.c DEPS base [EXTERN MPI::MPI_C])
#   The static library kvs_num of the folder src/num. DEPS are lower layers by their short name.
#   EXTERN are libraries from outside the project; the product links them too.
# kvs_simd(attn_avx2.c "-mavx2 -mfma -mf16c")
#   Flags for one file of the current folder. Such a file may define no external inline function:
#   the linker could keep the wide copy for a machine that lacks it.
# kvs_program(kvspan SOURCES main.c opt.c [TARGET kvspan_program] [INSTALL])
#   A program that sees the public headers and the archive only, as any outside program would. It
#   lies in the top of the build folder. TARGET is its name in CMake, where that must differ.
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
    # clang takes 24 minutes over one file of unrolled vectors with checks in them. Fuzzing is about what stands above
    # the kernels; their own tests run under the sanitizers of gcc.
    if(KVS_FUZZ)
        string(APPEND flags " -fno-sanitize=all")
    endif()
    set_property(SOURCE "${file}" APPEND_STRING PROPERTY COMPILE_FLAGS " ${flags}")
endfunction()

function(kvs_program name)
    cmake_parse_arguments(P "INSTALL" "TARGET" "SOURCES" ${ARGN})
    if(NOT P_TARGET)
        set(P_TARGET ${name})
    endif()
    add_executable(${P_TARGET} ${P_SOURCES})
    set_target_properties(${P_TARGET} PROPERTIES OUTPUT_NAME ${name}
                          RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
    target_include_directories(${P_TARGET} PRIVATE "${PROJECT_SOURCE_DIR}")
    target_link_libraries(${P_TARGET} PRIVATE kvs_flags kvspan::kvspan_static)
    if(P_INSTALL)
        install(TARGETS ${P_TARGET})
    endif()
endfunction()
