# Compile flags of every object of the project. Floating point is strict everywhere: no fast-math,
# no contraction; a fused multiply-add exists only where the source says fma() or an intrinsic.
set(CMAKE_C_STANDARD 17)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_C_FLAGS_RELEASE "-O2 -DNDEBUG" CACHE STRING "" FORCE)
set(CMAKE_C_FLAGS_DEBUG "-O1 -g -fno-omit-frame-pointer" CACHE STRING "" FORCE)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

set(KVS_GEN_DIR "${CMAKE_BINARY_DIR}/gen/include")

# kvs_flags: an interface target that every object, test and program links.
add_library(kvs_flags INTERFACE)
target_compile_definitions(kvs_flags INTERFACE _GNU_SOURCE)
set(host "$<NOT:$<COMPILE_LANGUAGE:CUDA>>")
target_compile_options(kvs_flags INTERFACE
    -Wall -Wextra -Wshadow -ffp-contract=off "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/="
    "$<${host}:-Wpedantic;-Wconversion>"
    $<$<COMPILE_LANGUAGE:C>:-Wstrict-prototypes -Wmissing-prototypes -Wimplicit-fallthrough
      -Werror=vla>
    "$<$<COMPILE_LANGUAGE:CUDA>:-lineinfo;-fno-exceptions;-fno-rtti;-fno-threadsafe-statics;-fno-gnu-unique>"
    "$<$<BOOL:${KVS_WERROR}>:$<IF:${host},-Werror,-Werror=all-warnings>>")
if(KVS_SANITIZE)
    # Reports need lines, not variables: -g takes twice as long over unrolled vectors with checks in them.
    target_compile_options(kvs_flags INTERFACE "-fsanitize=${KVS_SANITIZE}"
                           -fno-sanitize-recover=all -g1)
    target_link_options(kvs_flags INTERFACE "-fsanitize=${KVS_SANITIZE}")
endif()
if(KVS_FUZZ)
    if(NOT CMAKE_C_COMPILER_ID MATCHES "Clang")
        message(FATAL_ERROR "KVS_FUZZ needs clang; set CMAKE_C_COMPILER=clang")
    endif()
    target_compile_options(kvs_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
