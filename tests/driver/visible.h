/* Which devices CUDA enumerates: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. */
#ifndef STAND_IN_VISIBLE_H
#define STAND_IN_VISIBLE_H

#include "scenario.h"

enum { ORDINALS = GPUS * (1 + SLOTS) };

/* Fills `into` (room for ORDINALS) in CUDA's order for these values of the two variables (NULL: unset); answers
 * how many. Needs a machine. */
int visible_devices(const char *visible, const char *order, struct place *into);

#endif
