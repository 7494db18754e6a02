/* unit.h: what every unit test needs before cmocka.h, and the count of a table. */
#ifndef UNIT_H
#define UNIT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define UNIT_COUNT(table) (sizeof(table) / sizeof *(table))

#endif
