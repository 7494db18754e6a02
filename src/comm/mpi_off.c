/* comm/mpi_off.c: in place of mpi.c where the build has no MPI. */
#include "base/err.h"
#include "comm/comm.h"

kvs_status comm_mpi_open(comm **out, const comm_config *cfg, kvs_error *err)
{
    (void)cfg;
    *out = NULL;
    return err_set(err, KVS_UNSUPPORTED,
                   "this build has no MPI; configure with -DKVS_MPI=ON or use thread ranks");
}
