/* What the ring makes of system calls that are interrupted, refused or half done. */
#define _GNU_SOURCE
#include <stdarg.h>

static long faulty_syscall(long number, ...);
#define ZI_SYSCALL faulty_syscall
#include "../io/uring.c"

#include "check.h"

#ifdef IORING_FEAT_RW_CUR_POS

#include <fcntl.h>
#include <sched.h>

static struct {
	int setup_error;
	int probe_error;
	int enter_error;	/* for the next num_enter_errors calls */
	int num_enter_errors;
	unsigned max_entries;	/* 0 for all */
	int result;		/* in place of the next num_results ones */
	int num_results;
	struct zi_uring *ring;
} faults;

static long fail(int error)
{
	errno = error;
	return -1;
}

static void spoil_results(struct zi_uring *ring)
{
	unsigned tail = load_acquire(ring->cq_tail);

	for (unsigned head = *ring->cq_head; head != tail; head++) {
		struct io_uring_cqe *cqe = &ring->cqes[head & ring->cq_mask];

		if (cqe->user_data != (uint64_t)ring->depth &&
		    faults.num_results > 0) {
			cqe->res = faults.result;
			faults.num_results--;
		}
	}
}

static long faulty_enter(va_list args)
{
	int fd = va_arg(args, int);
	unsigned num_entries = va_arg(args, unsigned);
	int min_complete = va_arg(args, int);
	unsigned flags = va_arg(args, unsigned);
	long result;

	if (faults.num_enter_errors > 0) {
		faults.num_enter_errors--;
		return fail(faults.enter_error);
	}
	if (faults.max_entries && num_entries > faults.max_entries) {
		num_entries = faults.max_entries;
		min_complete = 0;
	}
	result = syscall(__NR_io_uring_enter, fd, num_entries, min_complete,
			 flags, NULL, 0);
	if (result >= 0 && faults.ring)
		spoil_results(faults.ring);
	return result;
}

static long faulty_syscall(long number, ...)
{
	va_list args;
	long result = -1;

	va_start(args, number);
	if (number == __NR_io_uring_setup) {
		int num_entries = va_arg(args, int);
		void *params = va_arg(args, void *);

		result = faults.setup_error ? fail(faults.setup_error) :
			 syscall(number, num_entries, params);
	} else if (number == __NR_io_uring_register) {
		int fd = va_arg(args, int);
		int opcode = va_arg(args, int);
		void *probe = va_arg(args, void *);
		int num_ops = va_arg(args, int);

		result = faults.probe_error ? fail(faults.probe_error) :
			 syscall(number, fd, opcode, probe, num_ops);
	} else {
		result = faulty_enter(args);
	}
	va_end(args);
	return result;
}

static struct zi_uring *make_ring(void)
{
	struct zi_uring *ring = NULL;

	memset(&faults, 0, sizeof(faults));
	CHECK(zi_uring_create(4, &ring) == 0);
	faults.ring = ring;
	return ring;
}

static int zeros_fd;

static void submit_zeros(struct zi_uring *ring, int slot, uint8_t *byte)
{
	*byte = 1;
	CHECK(zi_uring_submit(ring, slot, zeros_fd, byte, 1, 0) == 0);
}

static void test_refusals_are_told_apart(void)
{
	struct zi_uring *ring;

	memset(&faults, 0, sizeof(faults));
	faults.setup_error = EPERM;
	CHECK(zi_uring_create(4, &ring) == -EPERM);
	CHECK(zi_uring_probe() == -EPERM);
	faults.setup_error = 0;
	faults.probe_error = EINVAL;
	CHECK(zi_uring_create(4, &ring) == -ENOSYS);
	faults.probe_error = EPERM;
	CHECK(zi_uring_create(4, &ring) == -EPERM);
}

static void test_interrupted_waits_go_on(void)
{
	struct zi_uring *ring = make_ring();
	zi_completion done;
	uint8_t byte;

	submit_zeros(ring, 0, &byte);
	faults.enter_error = EINTR;
	faults.num_enter_errors = 3;
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1);
	CHECK(faults.num_enter_errors == 0 && done.result == 1 && byte == 0);
	CHECK(zi_uring_destroy(ring) == 0);
}

static void test_reads_taken_one_by_one_all_arrive(void)
{
	struct zi_uring *ring = make_ring();
	zi_completion done[4];
	uint8_t bytes[4];

	for (int slot = 0; slot < 4; slot++)
		submit_zeros(ring, slot, &bytes[slot]);
	faults.max_entries = 1;
	CHECK(zi_uring_wait(ring, 4, done, 4) == 4);
	for (int slot = 0; slot < 4; slot++)
		CHECK(bytes[slot] == 0 && done[slot].result == 1);
	CHECK(ring->num_held == 0 && ring->num_reads == 0);
	CHECK(zi_uring_destroy(ring) == 0);
}

static void test_no_memory_for_the_first_read_is_an_error(void)
{
	struct zi_uring *ring = make_ring();
	zi_completion done;
	uint8_t byte;

	submit_zeros(ring, 0, &byte);
	faults.enter_error = EAGAIN;
	faults.num_enter_errors = 1;
	CHECK(zi_uring_wait(ring, 1, &done, 1) == -EAGAIN);
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1);
	CHECK(done.result == 1);
	CHECK(zi_uring_destroy(ring) == 0);
}

static void test_no_memory_for_another_read_waits_for_the_first(int error)
{
	struct zi_uring *ring = make_ring();
	zi_completion done;
	uint8_t bytes[2];
	int ends[2];

	CHECK(pipe2(ends, O_CLOEXEC) == 0);
	CHECK(zi_uring_submit(ring, 0, ends[0], bytes, 1, 0) == 0);
	CHECK(zi_uring_wait(ring, 0, &done, 1) == 0);
	CHECK(write(ends[1], "x", 1) == 1);
	submit_zeros(ring, 1, &bytes[1]);
	faults.enter_error = error;
	faults.num_enter_errors = 1;
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1);
	CHECK(done.slot == 0 && bytes[0] == 'x');
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1);
	CHECK(done.slot == 1 && bytes[1] == 0);
	CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
	CHECK(zi_uring_destroy(ring) == 0);
}

static void test_reads_put_off_are_tried_again(int error)
{
	struct zi_uring *ring = make_ring();
	zi_completion done;
	uint8_t byte;

	submit_zeros(ring, 0, &byte);
	faults.result = -error;
	faults.num_results = MAX_RETRIES;
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1);
	CHECK(done.result == 1 && byte == 0);
	submit_zeros(ring, 0, &byte);
	faults.num_results = MAX_RETRIES + 1;
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1);
	CHECK(done.result == -error);
	CHECK(zi_uring_destroy(ring) == 0);
}

static void test_errors_and_short_counts_are_passed_on(void)
{
	struct zi_uring *ring = make_ring();
	zi_completion done;
	uint8_t byte;

	submit_zeros(ring, 0, &byte);
	faults.result = -EIO;
	faults.num_results = 1;
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1 && done.result == -EIO);
	submit_zeros(ring, 0, &byte);
	faults.result = 0;
	faults.num_results = 1;
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1 && done.result == 0);
	CHECK(zi_uring_destroy(ring) == 0);
}

static void test_destroy_reports_a_ring_that_cannot_be_waited_for(void)
{
	static uint8_t byte;
	struct zi_uring *ring = make_ring();
	zi_completion done;
	int ends[2];

	CHECK(pipe2(ends, O_CLOEXEC) == 0);
	CHECK(zi_uring_submit(ring, 0, ends[0], &byte, 1, 0) == 0);
	CHECK(zi_uring_wait(ring, 0, &done, 1) == 0);
	faults.enter_error = EBADF;
	faults.num_enter_errors = 1;
	CHECK(zi_uring_destroy(ring) == -EBADF);
	CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
}

static void test_destroy_takes_what_is_complete_although_it_cannot_wait(void)
{
	struct zi_uring *ring = make_ring();
	zi_completion done;
	uint8_t bytes[2];

	submit_zeros(ring, 0, &bytes[0]);
	submit_zeros(ring, 1, &bytes[1]);
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1);
	while (!has_completions(ring))
		sched_yield();
	faults.enter_error = EBADF;
	faults.num_enter_errors = 1;
	CHECK(zi_uring_destroy(ring) == 0);
}

int main(void)
{
	int error = zi_uring_probe();

	if (error) {
		fprintf(stderr, "no io_uring here: %s\n", strerror(-error));
		return EXIT_SKIPPED;
	}
	zeros_fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
	CHECK(zeros_fd >= 0);
	test_refusals_are_told_apart();
	test_interrupted_waits_go_on();
	test_reads_taken_one_by_one_all_arrive();
	test_no_memory_for_the_first_read_is_an_error();
	test_no_memory_for_another_read_waits_for_the_first(EAGAIN);
	test_no_memory_for_another_read_waits_for_the_first(EBUSY);
	test_reads_put_off_are_tried_again(EAGAIN);
	test_reads_put_off_are_tried_again(EINTR);
	test_errors_and_short_counts_are_passed_on();
	test_destroy_reports_a_ring_that_cannot_be_waited_for();
	test_destroy_takes_what_is_complete_although_it_cannot_wait();
	return 0;
}

#else

int main(void)
{
	return EXIT_SKIPPED;
}

#endif
