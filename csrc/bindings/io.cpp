#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "areas.h"
#include "zeroinfer/uring.h"

namespace nb = nanobind;

namespace {

using Buffer = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int checked(int result) {
    if (result < 0) {
        errno = -result;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
    return result;
}

/* Keeps the memory of every read alive until its completion was returned. */
class Uring {
  public:
    explicit Uring(int depth) {
        checked(zi_uring_create(depth, &ring_));
        buffers_.resize(size_t(depth));
        done_.resize(size_t(depth));
    }

    Uring(const Uring &) = delete;
    Uring &operator=(const Uring &) = delete;

    ~Uring() { destroy(); }

    void submit(int slot, int fd, Buffer buffer, int64_t offset) {
        checked(zi_uring_submit(opened(), slot, fd, buffer.data(), buffer.nbytes(), offset));
        buffers_[size_t(slot)] = std::move(buffer);
    }

    std::vector<std::pair<int, int>> wait() {
        zi_uring *ring = opened();
        int num_done;
        {
            nb::gil_scoped_release release;
            num_done = zi_uring_wait(ring, 1, done_.data(), int(done_.size()));
        }
        std::vector<std::pair<int, int>> results;
        const int num_checked = checked(num_done);
        for (int i = 0; i < num_checked; ++i) {
            buffers_[size_t(done_[size_t(i)].slot)] = Buffer();
            results.emplace_back(done_[size_t(i)].slot, done_[size_t(i)].result);
        }
        return results;
    }

    void wake() { checked(zi_uring_wake(opened())); }

    void close() { checked(destroy()); }

  private:
    int destroy() {
        zi_uring *ring = std::exchange(ring_, nullptr);
        int error;
        {
            nb::gil_scoped_release release;
            error = zi_uring_destroy(ring);
        }
        if (error != 0) {
            /* The kernel may still write to this memory: it is never let go. */
            (void)new std::vector<Buffer>(std::move(buffers_));
        }
        buffers_.clear();
        return error;
    }

    zi_uring *opened() const {
        if (ring_ == nullptr) {
            throw nb::value_error("the ring is closed");
        }
        return ring_;
    }

    zi_uring *ring_ = nullptr;
    std::vector<Buffer> buffers_;
    std::vector<zi_completion> done_;
};

}  // namespace

void bind_io(nb::module_ &m) {
    m.def("uring_probe", &zi_uring_probe,
          "Return 0 if io_uring can be used here, else a negative errno.");
    nb::class_<Uring>(m, "Uring", "Reads in flight in io_uring; see zeroinfer/uring.h.")
        .def(nb::init<int>(), nb::arg("depth"))
        .def("submit", &Uring::submit, nb::arg("slot"), nb::arg("fd"),
             nb::arg("buffer").noconvert(), nb::arg("offset"),
             "Put a read into a free slot; the next wait hands it to the kernel.")
        .def("wait", &Uring::wait,
             "Sleep until reads complete or wake is called; return (slot, bytes or -errno).")
        .def("wake", &Uring::wake, "End a wait; from any thread.")
        .def("close", &Uring::close,
             "Wait for reads in flight and free the ring; idempotent. An error says that they may "
             "still write: their memory is kept alive to the end of the process.");
}
