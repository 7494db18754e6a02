# KVS_HAVE_CUDA: whether this build has the CUDA kernels, by KVS_CUDA: ON, OFF, or AUTO, which takes
# them where both nvcc and a GPU's device file are found, so that a machine without a GPU spends no
# time on them. nvcc is looked for in the PATH and in /usr/local/cuda. With CUDA:
#   kvs_cuda_flags  an interface target: flags of .cu files, and the headers of the CUDA runtime
#   KVS_CUDA_LIBS   the CUDA runtime, linked statically: a program starts on machines without a
#                   driver, and says what is missing once it is asked for a device.
# Code is for Hopper alone (sm_90a): no other architecture, no PTX that a driver would compile.
set(KVS_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (with nvcc and a GPU), ON or OFF")
set_property(CACHE KVS_CUDA PROPERTY STRINGS AUTO ON OFF)
find_program(KVS_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda/bin)

set(KVS_HAVE_CUDA FALSE)
set(KVS_CUDA_LIBS "")
if(KVS_CUDA STREQUAL "AUTO")
    if(KVS_NVCC AND EXISTS "/dev/nvidiactl")
        set(KVS_HAVE_CUDA TRUE)
    endif()
elseif(KVS_CUDA)
    if(NOT KVS_NVCC)
        message(FATAL_ERROR "KVS_CUDA is ON, but there is no nvcc in the PATH or in "
                            "/usr/local/cuda/bin: install CUDA 12.8 or later, or set KVS_NVCC")
    endif()
    set(KVS_HAVE_CUDA TRUE)
endif()
if(KVS_HAVE_CUDA AND KVS_SANITIZE)
    # Host sanitizers and the CUDA runtime do not go together; compute-sanitizer checks kernels.
    if(NOT KVS_CUDA STREQUAL "AUTO")
        message(FATAL_ERROR "KVS_CUDA does not go with KVS_SANITIZE: set one of them OFF")
    endif()
    set(KVS_HAVE_CUDA FALSE)
endif()

if(KVS_HAVE_CUDA)
    set(CMAKE_CUDA_COMPILER "${KVS_NVCC}")
    set(CMAKE_CUDA_ARCHITECTURES OFF) # the flag below says it; CMake's own form lacks the "a"
    set(CMAKE_CUDA_FLAGS_INIT "-gencode=arch=compute_90a,code=sm_90a")
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    set(CMAKE_CUDA_RUNTIME_LIBRARY None) # ours is in KVS_CUDA_LIBS
    set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
    enable_language(CUDA)
    find_package(CUDAToolkit 12.8 REQUIRED)
    add_library(kvs_cuda_flags INTERFACE)
    target_include_directories(kvs_cuda_flags SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
    target_compile_definitions(kvs_cuda_flags INTERFACE KVS_HAVE_CUDA=1)
    set(KVS_CUDA_LIBS "${CUDA_cudart_static_LIBRARY}" Threads::Threads dl rt)
    message(STATUS "kvspan: CUDA kernels for sm_90a with ${KVS_NVCC}")
else()
    message(STATUS "kvspan: no CUDA kernels (KVS_CUDA is ${KVS_CUDA})")
endif()
