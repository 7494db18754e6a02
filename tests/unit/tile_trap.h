/* tile_trap.h - tile instructions on a processor without AMX. */
#ifndef UNIT_TILE_TRAP_H
#define UNIT_TILE_TRAP_H

/* From now on SIGILL of a tile instruction does what the instruction does. Once in each test: cmocka sets
 * handlers of its own around it. */
void tile_trap_install(void);

#endif
