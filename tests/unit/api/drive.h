/* drive.h - an engine driven by a test until nothing is left to do. A failure fails the test. */
#ifndef UNIT_API_DRIVE_H
#define UNIT_API_DRIVE_H

#include "kvspan/engine.h"

kvs_engine *drive_open(const kvs_engine_config *c);
/* Returns the request's number. */
uint64_t drive_submit(kvs_engine *e, const kvs_request *r);
/* Steps until the engine is idle; on_event sees every event. */
void drive(kvs_engine *e, void (*on_event)(void *ctx, kvs_engine *e, const kvs_event *ev),
           void *ctx);

#endif
