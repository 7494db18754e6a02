/* model/hp_keys.h - which keys of a config.json are known.
 *
 * A key is read (hp_json.c uses it), or skipped because it is known to change nothing that this library does, or
 * unknown. An unknown key whose value switches nothing on (null, false, 0, "", [], {}) is skipped too, as are
 * names that begin with an underscore; any other unknown key may change the maths and is refused by name. */
#ifndef MODEL_HP_KEYS_H
#define MODEL_HP_KEYS_H

#include <jansson.h>

#include "kvspan/status.h"

/* KVS_UNSUPPORTED names the first unknown key of the config's object that is set. */
kvs_status hp_keys_check(const json_t *config, kvs_error *err);
/* The same of the object that holds the rope settings, which is called `where`. There any value but null counts as
 * set: readers take some of its flags for true where they are absent. */
kvs_status hp_keys_check_rope(const json_t *rope, const char *where, kvs_error *err);
/* KVS_FORMAT names the first key of an indexer that is set; `arch` is an architecture without one. */
kvs_status hp_keys_check_no_index(const json_t *config, const char *arch, kvs_error *err);

#endif
