/*
 * The raw kernel interface: two queues in memory shared with the kernel, and
 * three system calls. See the header for the rules of use.
 */
#define _GNU_SOURCE
#include "zeroinfer/uring.h"

#include <errno.h>

#if !defined(ZI_NO_IO_URING) && defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

/* Everything used here is in the headers of Linux 5.6, as this macro is. */
#ifdef IORING_FEAT_RW_CUR_POS

#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Tests put a system call that fails in its place. */
#ifndef ZI_SYSCALL
#define ZI_SYSCALL syscall
#endif

#define MAX_READ_BYTES ((size_t)1 << 30)
#define MAX_RETRIES 8

struct zi_read {
	int fd;
	void *buffer;
	size_t length;
	int64_t offset;
	int num_retries;
	bool is_busy;
};

struct zi_uring {
	int fd;
	int wake_fd;
	int depth;
	int num_reads;		/* submitted and not yet returned */
	int num_held;		/* those of them that the kernel has taken */
	unsigned num_pending;	/* entries, of reads or not, it has not taken */
	void *queues;
	size_t queues_bytes;
	struct io_uring_sqe *sqes;
	size_t sqes_bytes;
	unsigned *sq_tail;
	unsigned *sq_array;
	unsigned sq_mask;
	unsigned *cq_head;
	unsigned *cq_tail;
	unsigned cq_mask;
	struct io_uring_cqe *cqes;
	struct zi_read reads[];
};

static unsigned load_acquire(const unsigned *place)
{
	return __atomic_load_n(place, __ATOMIC_ACQUIRE);
}

static void store_release(unsigned *place, unsigned value)
{
	__atomic_store_n(place, value, __ATOMIC_RELEASE);
}

/*
 * The queue cannot be full: it has an entry for each slot and one for the wake
 * event, and neither is written again before it completed.
 */
static struct io_uring_sqe *next_entry(struct zi_uring *ring, int user_data)
{
	unsigned idx = *ring->sq_tail & ring->sq_mask;
	struct io_uring_sqe *sqe = &ring->sqes[idx];

	memset(sqe, 0, sizeof(*sqe));
	sqe->user_data = (uint64_t)user_data;
	ring->sq_array[idx] = idx;
	return sqe;
}

static void publish_entry(struct zi_uring *ring)
{
	store_release(ring->sq_tail, *ring->sq_tail + 1);
	ring->num_pending++;
}

static void push_read(struct zi_uring *ring, int slot, unsigned char flags)
{
	const struct zi_read *read = &ring->reads[slot];
	struct io_uring_sqe *sqe = next_entry(ring, slot);

	sqe->opcode = IORING_OP_READ;
	sqe->flags = flags;
	sqe->fd = read->fd;
	sqe->addr = (uint64_t)(uintptr_t)read->buffer;
	sqe->len = (unsigned)read->length;
	sqe->off = (uint64_t)read->offset;
	publish_entry(ring);
}

/* Completes once per wake, so that a thread asleep in the kernel wakes up. */
static void push_wake_event(struct zi_uring *ring)
{
	struct io_uring_sqe *sqe = next_entry(ring, ring->depth);

	sqe->opcode = IORING_OP_POLL_ADD;
	sqe->fd = ring->wake_fd;
	sqe->poll_events = POLLIN;
	publish_entry(ring);
}

static bool is_supported(const struct io_uring_probe *probe, unsigned opcode)
{
	return opcode <= probe->last_op &&
	       (probe->ops[opcode].flags & IO_URING_OP_SUPPORTED);
}

static int check_operations(int fd)
{
	enum { NUM_OPS = 256 };
	struct io_uring_probe *probe;
	int error = 0;

	probe = calloc(1, sizeof(*probe) + NUM_OPS * sizeof(probe->ops[0]));
	if (!probe)
		return -ENOMEM;
	if (ZI_SYSCALL(__NR_io_uring_register, fd, IORING_REGISTER_PROBE,
		       probe, NUM_OPS) < 0)
		error = errno == EINVAL ? -ENOSYS : -errno;
	else if (!is_supported(probe, IORING_OP_READ) ||
		 !is_supported(probe, IORING_OP_POLL_ADD))
		error = -ENOSYS;
	free(probe);
	return error;
}

static int map_shared(int fd, size_t size, uint64_t offset, void **out)
{
	void *place = mmap(NULL, size, PROT_READ | PROT_WRITE,
			   MAP_SHARED | MAP_POPULATE, fd, (off_t)offset);

	if (place == MAP_FAILED)
		return -errno;
	*out = place;
	return 0;
}

static int map_queues(struct zi_uring *ring, const struct io_uring_params *p)
{
	size_t sq_bytes = p->sq_off.array + p->sq_entries * sizeof(unsigned);
	size_t cq_bytes = p->cq_off.cqes +
			  p->cq_entries * sizeof(struct io_uring_cqe);
	size_t bytes = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
	void *place = NULL;
	char *base;
	int error;

	error = map_shared(ring->fd, bytes, IORING_OFF_SQ_RING, &place);
	if (error)
		return error;
	ring->queues = place;
	ring->queues_bytes = bytes;
	base = place;
	ring->sq_tail = (unsigned *)(base + p->sq_off.tail);
	ring->sq_mask = *(unsigned *)(base + p->sq_off.ring_mask);
	ring->sq_array = (unsigned *)(base + p->sq_off.array);
	ring->cq_head = (unsigned *)(base + p->cq_off.head);
	ring->cq_tail = (unsigned *)(base + p->cq_off.tail);
	ring->cq_mask = *(unsigned *)(base + p->cq_off.ring_mask);
	ring->cqes = (struct io_uring_cqe *)(base + p->cq_off.cqes);

	bytes = p->sq_entries * sizeof(struct io_uring_sqe);
	error = map_shared(ring->fd, bytes, IORING_OFF_SQES, &place);
	if (error)
		return error;
	ring->sqes = place;
	ring->sqes_bytes = bytes;
	return 0;
}

static int open_ring(struct zi_uring *ring)
{
	const unsigned needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
	struct io_uring_params params = { 0 };
	int error;

	ring->fd = (int)ZI_SYSCALL(__NR_io_uring_setup, ring->depth + 1,
				   &params);
	if (ring->fd < 0)
		return -errno;
	if ((params.features & needed) != needed)
		return -ENOSYS;
	error = check_operations(ring->fd);
	if (error)
		return error;
	ring->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (ring->wake_fd < 0)
		return -errno;
	return map_queues(ring, &params);
}

static void free_ring(struct zi_uring *ring)
{
	if (ring->sqes)
		munmap(ring->sqes, ring->sqes_bytes);
	if (ring->queues)
		munmap(ring->queues, ring->queues_bytes);
	if (ring->wake_fd >= 0)
		close(ring->wake_fd);
	if (ring->fd >= 0)
		close(ring->fd);
	free(ring);
}

int zi_uring_probe(void)
{
	struct zi_uring *ring = NULL;
	int error = zi_uring_create(1, &ring);

	return error ? error : zi_uring_destroy(ring);
}

int zi_uring_create(int depth, struct zi_uring **out)
{
	struct zi_uring *ring;
	int error;

	if (depth < 1 || depth > ZI_URING_MAX_DEPTH || !out)
		return -EINVAL;
	ring = calloc(1, sizeof(*ring) +
			 (size_t)depth * sizeof(ring->reads[0]));
	if (!ring)
		return -ENOMEM;
	ring->fd = -1;
	ring->wake_fd = -1;
	ring->depth = depth;
	error = open_ring(ring);
	if (error) {
		free_ring(ring);
		return error;
	}
	push_wake_event(ring);
	*out = ring;
	return 0;
}

int zi_uring_submit(struct zi_uring *ring, int slot, int fd, void *buffer,
		    size_t length, int64_t offset)
{
	if (!ring || slot < 0 || slot >= ring->depth || offset < 0)
		return -EINVAL;
	if (ring->reads[slot].is_busy)
		return -EBUSY;
	ring->reads[slot] = (struct zi_read){
		.fd = fd,
		.buffer = buffer,
		.length = length < MAX_READ_BYTES ? length : MAX_READ_BYTES,
		.offset = offset,
		.is_busy = true,
	};
	ring->num_reads++;
	push_read(ring, slot, 0);
	return 0;
}

/*
 * Let the kernel take up to `num_entries` pending entries and, if asked to,
 * sleep for a completion.
 */
static int enter(struct zi_uring *ring, unsigned num_entries, bool is_blocking)
{
	long num_taken = ZI_SYSCALL(__NR_io_uring_enter, ring->fd, num_entries,
				    is_blocking, IORING_ENTER_GETEVENTS, NULL,
				    0);

	if (num_taken < 0)
		return -errno;
	for (; num_taken > 0; num_taken--, ring->num_pending--) {
		unsigned idx = *ring->sq_tail - ring->num_pending;
		uint64_t taken = ring->sqes[idx & ring->sq_mask].user_data;

		ring->num_held += taken != (uint64_t)ring->depth;
	}
	return 0;
}

static int submit_and_sleep(struct zi_uring *ring, bool is_blocking)
{
	int error = enter(ring, ring->num_pending, is_blocking);

	/* Short of memory: reads that complete give some back. */
	if ((error == -EAGAIN || error == -EBUSY) && ring->num_held > 0)
		error = enter(ring, 0, is_blocking);
	return error == -EINTR ? 0 : error;
}

/*
 * Some kernels put a read off instead of waiting for a full device queue. In
 * a worker of the kernel, which may sleep, it is not put off again.
 */
static bool is_tried_again(struct zi_uring *ring, int slot, int result)
{
	struct zi_read *read = &ring->reads[slot];

	if (result != -EAGAIN && result != -EINTR)
		return false;
	if (read->num_retries == MAX_RETRIES)
		return false;
	read->num_retries++;
	push_read(ring, slot, IOSQE_ASYNC);
	return true;
}

static void rearm_wake_event(struct zi_uring *ring)
{
	uint64_t count;

	/* Nothing to read is no error: the event is armed again all the same. */
	if (read(ring->wake_fd, &count, sizeof(count)) < 0)
		count = 0;
	push_wake_event(ring);
}

static int reap(struct zi_uring *ring, struct zi_completion *out, int capacity,
		bool *is_woken)
{
	unsigned head = *ring->cq_head;
	unsigned tail = load_acquire(ring->cq_tail);
	int num = 0;

	for (; head != tail && num < capacity; head++) {
		const struct io_uring_cqe *cqe =
			&ring->cqes[head & ring->cq_mask];
		int slot = (int)cqe->user_data;

		if (slot == ring->depth) {
			rearm_wake_event(ring);
			*is_woken = true;
			continue;
		}
		ring->num_held--;
		if (is_tried_again(ring, slot, cqe->res))
			continue;
		ring->reads[slot].is_busy = false;
		ring->num_reads--;
		out[num++] = (struct zi_completion){
			.slot = slot,
			.result = cqe->res,
		};
	}
	store_release(ring->cq_head, head);
	return num;
}

static bool has_completions(const struct zi_uring *ring)
{
	return *ring->cq_head != load_acquire(ring->cq_tail);
}

int zi_uring_wait(struct zi_uring *ring, int min_completions,
		  struct zi_completion *out, int capacity)
{
	bool is_woken = false;
	int num = 0;

	if (!ring || !out || min_completions < 0 ||
	    min_completions > capacity || min_completions > ring->num_reads)
		return -EINVAL;
	do {
		if (ring->num_pending || !has_completions(ring)) {
			int error = submit_and_sleep(ring, min_completions > 0);

			if (error)
				return num ? num : error;
		}
		num += reap(ring, out + num, capacity - num, &is_woken);
	} while (num < min_completions && !is_woken);
	return num;
}

int zi_uring_wake(struct zi_uring *ring)
{
	const uint64_t one = 1;

	if (!ring)
		return -EINVAL;
	/* A counter that is full wakes as well. */
	if (write(ring->wake_fd, &one, sizeof(one)) < 0 && errno != EAGAIN)
		return -errno;
	return 0;
}

int zi_uring_destroy(struct zi_uring *ring)
{
	int error = 0;

	if (!ring)
		return 0;
	while (ring->num_held > 0 && !error) {
		struct zi_completion unused;
		bool is_woken;

		error = enter(ring, 0, true);
		if (error == -EINTR)
			error = 0;
		while (reap(ring, &unused, 1, &is_woken) > 0)
			;
	}
	/* What matters is whether the kernel is done, not whether it told. */
	if (ring->num_held == 0)
		error = 0;
	free_ring(ring);
	return error;
}

#else

int zi_uring_probe(void)
{
	return -ENOSYS;
}

int zi_uring_create(int depth, struct zi_uring **out)
{
	(void)depth;
	(void)out;
	return -ENOSYS;
}

int zi_uring_submit(struct zi_uring *ring, int slot, int fd, void *buffer,
		    size_t length, int64_t offset)
{
	(void)ring;
	(void)slot;
	(void)fd;
	(void)buffer;
	(void)length;
	(void)offset;
	return -ENOSYS;
}

int zi_uring_wait(struct zi_uring *ring, int min_completions,
		  struct zi_completion *out, int capacity)
{
	(void)ring;
	(void)min_completions;
	(void)out;
	(void)capacity;
	return -ENOSYS;
}

int zi_uring_wake(struct zi_uring *ring)
{
	(void)ring;
	return -ENOSYS;
}

int zi_uring_destroy(struct zi_uring *ring)
{
	(void)ring;
	return 0;
}

#endif
