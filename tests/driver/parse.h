/* The scenario language. */
#ifndef STAND_IN_PARSE_H
#define STAND_IN_PARSE_H

#include "scenario.h"

/* Parse `text`, which is modified, into `into`. An error ends the process with path and line. */
void parse_scenario(const char *path, char *text, struct scenario *into);

#endif
