/* A position is not a local index: with MIXED this file must not compile. */
#include "shard/shard.h"

int64_t index_types(shard_geom g, kvs_pos p);

int64_t index_types(shard_geom g, kvs_pos p)
{
    const kvs_local l = shard_local(g, p);
#ifdef MIXED
    return shard_pos(g, p).v + l.v;
#else
    return shard_pos(g, l).v;
#endif
}
