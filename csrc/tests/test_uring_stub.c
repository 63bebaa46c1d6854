/* Built without io_uring, everything says so. */
#define ZI_NO_IO_URING
#include "../io/uring.c"

#include "check.h"

int main(void)
{
	zi_uring *ring = NULL;
	zi_completion done;

	CHECK(zi_uring_probe() == -ENOSYS);
	CHECK(zi_uring_create(1, &ring) == -ENOSYS && ring == NULL);
	CHECK(zi_uring_submit(ring, 0, 0, &done, 1, 0) == -ENOSYS);
	CHECK(zi_uring_wait(ring, 0, &done, 1) == -ENOSYS);
	CHECK(zi_uring_wake(ring) == -ENOSYS);
	CHECK(zi_uring_destroy(ring) == 0);
	return 0;
}
