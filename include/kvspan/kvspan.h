/* kvspan/kvspan.h - every public header. */
#ifndef KVSPAN_KVSPAN_H
#define KVSPAN_KVSPAN_H

#include "kvspan/chat.h"
#include "kvspan/comm.h"
#include "kvspan/config.h"
#include "kvspan/dcp.h"
#include "kvspan/engine.h"
#include "kvspan/log.h"
#include "kvspan/plan.h"
#include "kvspan/status.h"
#include "kvspan/text.h"
#include "kvspan/version.h"

#endif
