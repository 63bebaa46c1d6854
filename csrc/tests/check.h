/* The one assertion of the C tests: says where, and ends the program. */
#ifndef ZEROINFER_TESTS_CHECK_H
#define ZEROINFER_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                   \
	do {                                                               \
		if (!(condition)) {                                        \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, \
				#condition);                               \
			exit(1);                                           \
		}                                                          \
	} while (0)

/* What a test that cannot run here returns. */
#define EXIT_SKIPPED 77

#endif
