/*
 * Reads kept in flight by the kernel's io_uring.
 *
 * A ring has `depth` slots; each holds at most one read. Reads are written to
 * the ring by zi_uring_submit and handed to the kernel, all at once, by the
 * next zi_uring_wait, which also sleeps for completions: one system call.
 *
 * Lifetime: buffer and descriptor of a read must stay valid from
 * zi_uring_submit until zi_uring_wait has returned its slot, or until
 * zi_uring_destroy has returned 0; after an error of it, for ever.
 * Threads: one thread at a time, and always the same one from the first submit
 * on, since the kernel cancels the reads of a thread that ends. Only
 * zi_uring_wake may be called from any thread.
 * Errors: negative errno values; nothing is printed, nothing aborts.
 */
#ifndef ZEROINFER_URING_H
#define ZEROINFER_URING_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ZI_URING_MAX_DEPTH 4096

typedef struct zi_uring zi_uring;

typedef struct zi_completion {
	int32_t slot;
	int32_t result;	/* bytes read, 0 at the end of the file, or -errno */
} zi_completion;

/*
 * Whether a ring can be made here: 0, -ENOSYS (built without io_uring, or a
 * kernel before 5.6), -EPERM (forbidden by the system), or what else the
 * kernel says.
 */
int zi_uring_probe(void);

/* Make a ring of 1 to ZI_URING_MAX_DEPTH slots. Errors as above, or -EINVAL. */
int zi_uring_create(int depth, zi_uring **out);

/*
 * Wait for the reads that the kernel holds, drop the others, free the ring.
 * NULL is allowed. An error says that the kernel refused to be waited for: it
 * may write to the buffers at any time, so they must never be freed or used
 * for anything else. The ring is gone all the same.
 */
int zi_uring_destroy(zi_uring *ring);

/*
 * Write a read of up to `length` bytes at `offset` of `fd` to a free slot. It
 * may come short, at the end of the file or anywhere before. Returns 0, -EINVAL
 * or, for a slot whose last read was not returned yet, -EBUSY.
 */
int zi_uring_submit(zi_uring *ring, int slot, int fd, void *buffer,
		    size_t length, int64_t offset);

/*
 * Hand pending reads to the kernel, sleep until `min_completions` reads are
 * complete or zi_uring_wake was called, and return how many are stored in
 * `out`, at most `capacity`; 0 for min_completions only looks. Interrupted
 * system calls are repeated; reads that the kernel puts off are tried again.
 * Returns -EINVAL for min_completions above capacity or above the reads
 * submitted, and -EAGAIN if the kernel has no memory to begin a single read.
 */
int zi_uring_wait(zi_uring *ring, int min_completions, zi_completion *out,
		  int capacity);

/* End the wait that is going on, or the next one, at once. */
int zi_uring_wake(zi_uring *ring);

#ifdef __cplusplus
}
#endif

#endif
