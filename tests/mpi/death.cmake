# cmake -DMPIEXEC=... -DPROGRAM=... -DHOW=... -P death.cmake
#   Runs mpi_death with 4 ranks, of which rank 2 dies; the others must end by themselves, each with
#   a message that names it. With recovery on, mpirun leaves the survivors alone; without, it ends
#   the job itself, which proves nothing about them.
execute_process(COMMAND "${MPIEXEC}" --enable-recovery -n 4 --oversubscribe "${PROGRAM}" "${HOW}"
                OUTPUT_VARIABLE out ERROR_VARIABLE err RESULT_VARIABLE rc TIMEOUT 60)
message("${out}${err}")
foreach(rank 0 1 3)
    if(NOT out MATCHES "rank ${rank}: KVS_PEER rank 2 more than 1500 ms late for ")
        message(FATAL_ERROR "rank ${rank} does not name rank 2 (mpirun gives '${rc}')")
    endif()
endforeach()
if(out MATCHES "rank 2: ")
    message(FATAL_ERROR "rank 2 lives")
endif()
