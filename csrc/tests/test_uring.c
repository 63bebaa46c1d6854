/* Reads through a real ring: whole, short, failing, many, woken and in flight at the end. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "zeroinfer/uring.h"

enum { FILE_BYTES = 40123, DEPTH = 8, CHUNK_BYTES = 512 };

static uint8_t expected[FILE_BYTES];

/* A file without a name, which goes with its descriptor. */
static int make_file(void)
{
	char path[] = "test_uring.XXXXXX";
	int fd = mkstemp(path);

	CHECK(fd >= 0);
	CHECK(unlink(path) == 0);
	for (size_t i = 0; i < FILE_BYTES; i++)
		expected[i] = (uint8_t)(i * 131 + i / 251);
	CHECK(write(fd, expected, FILE_BYTES) == FILE_BYTES);
	return fd;
}

static zi_uring *make_ring(int depth)
{
	zi_uring *ring = NULL;

	CHECK(zi_uring_create(depth, &ring) == 0);
	return ring;
}

/* Read once through slot 0 and return the result. */
static int read_once(zi_uring *ring, int fd, void *buffer, size_t length,
		     int64_t offset)
{
	zi_completion done;

	CHECK(zi_uring_submit(ring, 0, fd, buffer, length, offset) == 0);
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1);
	CHECK(done.slot == 0);
	return done.result;
}

static void test_arguments_are_checked(void)
{
	zi_uring *ring = NULL;
	zi_completion done;
	uint8_t byte;

	CHECK(zi_uring_create(0, &ring) == -EINVAL);
	CHECK(zi_uring_create(-1, &ring) == -EINVAL);
	CHECK(zi_uring_create(ZI_URING_MAX_DEPTH + 1, &ring) == -EINVAL);
	CHECK(zi_uring_create(1, NULL) == -EINVAL);
	CHECK(zi_uring_destroy(NULL) == 0);
	CHECK(zi_uring_wake(NULL) == -EINVAL);
	ring = make_ring(2);
	CHECK(zi_uring_submit(NULL, 0, 0, &byte, 1, 0) == -EINVAL);
	CHECK(zi_uring_submit(ring, -1, 0, &byte, 1, 0) == -EINVAL);
	CHECK(zi_uring_submit(ring, 2, 0, &byte, 1, 0) == -EINVAL);
	CHECK(zi_uring_submit(ring, 0, 0, &byte, 1, -1) == -EINVAL);
	CHECK(zi_uring_wait(NULL, 0, &done, 1) == -EINVAL);
	CHECK(zi_uring_wait(ring, 0, NULL, 1) == -EINVAL);
	CHECK(zi_uring_wait(ring, -1, &done, 1) == -EINVAL);
	/* Nobody would ever end this sleep. */
	CHECK(zi_uring_wait(ring, 1, &done, 1) == -EINVAL);
	CHECK(zi_uring_wait(ring, 0, &done, 1) == 0);
	CHECK(zi_uring_destroy(ring) == 0);
}

static void test_whole_and_short_reads(int fd)
{
	static uint8_t buffer[FILE_BYTES + 100];
	zi_uring *ring = make_ring(1);

	CHECK(read_once(ring, fd, buffer, FILE_BYTES, 0) == FILE_BYTES);
	CHECK(memcmp(buffer, expected, FILE_BYTES) == 0);
	CHECK(read_once(ring, fd, buffer, sizeof(buffer), 123) ==
	      FILE_BYTES - 123);
	CHECK(memcmp(buffer, expected + 123, FILE_BYTES - 123) == 0);
	CHECK(read_once(ring, fd, buffer, 10, FILE_BYTES - 3) == 3);
	CHECK(read_once(ring, fd, buffer, 10, FILE_BYTES) == 0);
	CHECK(read_once(ring, fd, buffer, 10, FILE_BYTES + 99999) == 0);
	CHECK(read_once(ring, fd, buffer, 0, 0) == 0);
	CHECK(zi_uring_destroy(ring) == 0);
}

static void test_failed_reads(int fd)
{
	zi_uring *ring = make_ring(1);
	int closed_fd = dup(fd);
	int folder_fd = open(".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	uint8_t buffer[16];

	CHECK(closed_fd >= 0 && folder_fd >= 0);
	CHECK(close(closed_fd) == 0);
	CHECK(read_once(ring, closed_fd, buffer, sizeof(buffer), 0) == -EBADF);
	CHECK(read_once(ring, folder_fd, buffer, sizeof(buffer), 0) == -EISDIR);
	/* A failure is of one read alone. */
	CHECK(read_once(ring, fd, buffer, sizeof(buffer), 0) == sizeof(buffer));
	CHECK(close(folder_fd) == 0);
	CHECK(zi_uring_destroy(ring) == 0);
}

static void test_many_reads_share_the_slots(int fd)
{
	static uint8_t buffers[DEPTH][CHUNK_BYTES];
	const int num_chunks = FILE_BYTES / CHUNK_BYTES;
	zi_uring *ring = make_ring(DEPTH);
	int chunk_of[DEPTH];
	int next = 0, num_done = 0;

	while (num_done < num_chunks) {
		zi_completion done[3];
		int num;

		for (int slot = 0; slot < DEPTH && next < num_chunks; slot++) {
			int error = zi_uring_submit(ring, slot, fd,
						    buffers[slot], CHUNK_BYTES,
						    next * CHUNK_BYTES);

			CHECK(error == 0 || error == -EBUSY);
			if (error == 0)
				chunk_of[slot] = next++;
		}
		num = zi_uring_wait(ring, 1, done, 3);
		CHECK(num >= 1 && num <= 3);
		for (int i = 0; i < num; i++, num_done++) {
			int slot = done[i].slot;

			CHECK(done[i].result == CHUNK_BYTES);
			CHECK(memcmp(buffers[slot],
				     expected + chunk_of[slot] * CHUNK_BYTES,
				     CHUNK_BYTES) == 0);
		}
	}
	CHECK(zi_uring_destroy(ring) == 0);
}

static void *wake_ring(void *ring)
{
	CHECK(zi_uring_wake(ring) == 0);
	return NULL;
}

static void test_a_wake_ends_the_wait(void)
{
	zi_uring *ring = make_ring(1);
	zi_completion done;
	int ends[2];
	uint8_t byte;

	CHECK(pipe2(ends, O_CLOEXEC) == 0);
	CHECK(zi_uring_submit(ring, 0, ends[0], &byte, 1, 0) == 0);
	for (int round = 0; round < 50; round++) {
		pthread_t thread;

		CHECK(pthread_create(&thread, NULL, wake_ring, ring) == 0);
		CHECK(zi_uring_wait(ring, 1, &done, 1) == 0);
		CHECK(pthread_join(thread, NULL) == 0);
	}
	CHECK(write(ends[1], "x", 1) == 1);
	CHECK(zi_uring_wait(ring, 1, &done, 1) == 1);
	CHECK(done.slot == 0 && done.result == 1 && byte == 'x');
	CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
	CHECK(zi_uring_destroy(ring) == 0);
}

static void *write_late(void *fd)
{
	usleep(20000);
	CHECK(write(*(int *)fd, "late", 4) == 4);
	return NULL;
}

static void test_destroy_waits_for_reads_in_flight(void)
{
	zi_uring *ring = make_ring(2);
	zi_completion done;
	pthread_t thread;
	uint8_t bytes[4] = { 0 };
	int ends[2];

	CHECK(pipe2(ends, O_CLOEXEC) == 0);
	CHECK(zi_uring_submit(ring, 0, ends[0], bytes, 4, 0) == 0);
	CHECK(zi_uring_wait(ring, 0, &done, 1) == 0);
	/* Never handed over, so never read nor waited for. */
	CHECK(zi_uring_submit(ring, 1, ends[0], bytes, 4, 0) == 0);
	CHECK(pthread_create(&thread, NULL, write_late, &ends[1]) == 0);
	CHECK(zi_uring_destroy(ring) == 0);
	CHECK(memcmp(bytes, "late", 4) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
}

int main(void)
{
	int error = zi_uring_probe();
	int fd;

	if (error) {
		fprintf(stderr, "no io_uring here: %s\n", strerror(-error));
		return EXIT_SKIPPED;
	}
	fd = make_file();
	test_arguments_are_checked();
	test_whole_and_short_reads(fd);
	test_failed_reads(fd);
	test_many_reads_share_the_slots(fd);
	test_a_wake_ends_the_wait();
	test_destroy_waits_for_reads_in_flight();
	return 0;
}
