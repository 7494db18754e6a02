# kvs_test(NAME LIBS shard base [SOURCES extra.c] [LABELS slow] [ARGS ...] [ENV K=V ...]
#          [TIMEOUT s] [NPROC n] [NO_VALGRIND])
#   test_NAME from test_NAME.c of the current folder, linked with those layers and cmocka, run by
#   ctest as NAME. The label is `fast` unless LABELS says otherwise; sanitizers run `fast`.
#   NPROC n runs it under mpirun with n ranks as NAME_npN (label mpi; only with KVS_MPI).
#   NO_VALGRIND keeps a fast test out of `make valgrind`: too slow there, or at odds with it.
# kvs_fuzz(NAME LIBS kv base [SOURCES extra.c])
#   fuzz_NAME from fuzz_NAME.c, which defines LLVMFuzzerTestOneInput. With KVS_FUZZ it is a
#   libFuzzer program; otherwise it replays its corpus folder (corpus/ beside the source) once,
#   as the ctest fuzz_NAME.
# kvs_subdirs(): adds every subfolder of the current one that has a CMakeLists.txt.
find_package(PkgConfig REQUIRED)
pkg_check_modules(CMOCKA REQUIRED IMPORTED_TARGET cmocka)
pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)

function(kvs_link target)
    target_link_libraries(${target} PRIVATE kvs_flags)
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src"
        "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/tests" "${KVS_GEN_DIR}")
    foreach(lib ${ARGN})
        if(TARGET kvs_${lib})
            target_link_libraries(${target} PRIVATE kvs_${lib})
        else()
            target_link_libraries(${target} PRIVATE ${lib})
        endif()
    endforeach()
endfunction()

function(kvs_test name)
    cmake_parse_arguments(T "NO_VALGRIND" "TIMEOUT;NPROC" "SOURCES;LIBS;LABELS;ARGS;ENV" ${ARGN})
    if(T_UNPARSED_ARGUMENTS)
        message(FATAL_ERROR "kvs_test(${name}): unknown arguments ${T_UNPARSED_ARGUMENTS}")
    endif()
    if(T_NPROC AND NOT KVS_MPI)
        return()
    endif()
    if(NOT TARGET test_${name})
        add_executable(test_${name} test_${name}.c ${T_SOURCES})
        kvs_link(test_${name} ${T_LIBS} PkgConfig::CMOCKA)
    endif()
    if(NOT T_LABELS)
        set(T_LABELS fast)
    endif()
    if(NOT T_TIMEOUT)
        set(T_TIMEOUT 300)
    endif()
    if(KVS_SANITIZE)
        math(EXPR T_TIMEOUT "4 * ${T_TIMEOUT}")
    endif()
    set(ctest_name ${name})
    set(command test_${name} ${T_ARGS})
    if(T_NPROC)
        set(ctest_name ${name}_np${T_NPROC})
        set(command "${MPIEXEC_EXECUTABLE}" ${MPIEXEC_NUMPROC_FLAG} ${T_NPROC} --oversubscribe
            $<TARGET_FILE:test_${name}> ${T_ARGS})
        set(T_LABELS mpi)
        list(APPEND T_ENV OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
             OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_vader_single_copy_mechanism=none)
    endif()
    add_test(NAME ${ctest_name} COMMAND ${command})
    if(T_NPROC)
        set_property(GLOBAL APPEND PROPERTY KVS_MPI_TESTS test_${name})
    elseif("fast" IN_LIST T_LABELS AND NOT T_NO_VALGRIND)
        set_property(GLOBAL APPEND PROPERTY KVS_VALGRIND_TESTS test_${name})
    endif()
    set_tests_properties(${ctest_name} PROPERTIES LABELS "${T_LABELS}" TIMEOUT ${T_TIMEOUT})
    if(T_ENV)
        set_tests_properties(${ctest_name} PROPERTIES ENVIRONMENT "${T_ENV}")
    endif()
endfunction()

function(kvs_fuzz name)
    cmake_parse_arguments(F "" "" "SOURCES;LIBS" ${ARGN})
    if(KVS_FUZZ)
        add_executable(fuzz_${name} fuzz_${name}.c ${F_SOURCES})
        target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
    else()
        add_executable(fuzz_${name} fuzz_${name}.c ${F_SOURCES}
                       "${PROJECT_SOURCE_DIR}/tests/fuzz/replay.c")
        add_test(NAME fuzz_${name}
                 COMMAND fuzz_${name} "${CMAKE_CURRENT_SOURCE_DIR}/corpus")
        set_tests_properties(fuzz_${name} PROPERTIES LABELS fast TIMEOUT 120)
    endif()
    kvs_link(fuzz_${name} ${F_LIBS})
    set_property(GLOBAL APPEND PROPERTY KVS_FUZZ_TESTS fuzz_${name})
endfunction()

# mpi_targets, valgrind_targets, fuzz_targets: the programs of one kind of test, with the list of the
# second in valgrind.txt. Called once, after all tests are known.
function(kvs_test_groups)
    foreach(group mpi:KVS_MPI_TESTS valgrind:KVS_VALGRIND_TESTS fuzz:KVS_FUZZ_TESTS)
        string(REGEX REPLACE ":.*" "" name "${group}")
        string(REGEX REPLACE ".*:" "" property "${group}")
        get_property(programs GLOBAL PROPERTY ${property})
        list(REMOVE_DUPLICATES programs)
        add_custom_target(${name}_targets DEPENDS ${programs})
        if(name STREQUAL "valgrind")
            list(TRANSFORM programs REPLACE "(.+)" "$<TARGET_FILE:\\1>")
            list(JOIN programs "\n" lines)
            file(GENERATE OUTPUT "${CMAKE_BINARY_DIR}/valgrind.txt" CONTENT "${lines}\n")
        endif()
    endforeach()
endfunction()

# cuda_targets: what `make cuda` builds and tests.
function(kvs_cuda_targets)
    if(KVS_HAVE_CUDA)
        add_custom_target(cuda_targets DEPENDS kvspan kvspan_program test_kern test_dev_host
            test_dev_cuda test_check_cuda test_cuda_cmd test_cuda_scratch)
    endif()
endfunction()

function(kvs_subdirs)
    file(GLOB found CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}" "*/CMakeLists.txt")
    foreach(item ${found})
        get_filename_component(dir "${item}" DIRECTORY)
        add_subdirectory(${dir})
    endforeach()
endfunction()
