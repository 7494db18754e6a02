# Thin: each target sets up what it needs on Debian 12 and calls CMake. CMakePresets.json has the
# builds, docs/testing.md says what the tests are.
JOBS         ?= $(shell nproc)
PREFIX       ?= /usr/local
FUZZ_SECONDS ?= 60
TOKENS       ?= 32768
RELEASE      := build/release

help:
	@echo "make run       build, then ask a model for a fact in a text of TOKENS=$(TOKENS) tokens"
	@echo "make check     check every kernel of this machine, show a short speed table"
	@echo "make test      build and run all tests"
	@echo "make asan      the fast tests under gcc's sanitizers of addresses and undefined behaviour;"
	@echo "make ubsan     the second of them alone;  make tsan  under the one of threads"
	@echo "make mpi       the program for mpirun, and the tests of ranks as processes"
	@echo "make cuda      build with the CUDA kernels (needs nvcc), and the tests of that build"
	@echo "make fuzz      every fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS)"
	@echo "make valgrind  the unit tests under valgrind"
	@echo "make install   into PREFIX=$(PREFIX)"
	@echo "make format    clang-format over the sources;  make clean  removes build/"

define build
	@cmake --preset $(1) >build/$(1).log 2>&1 || { cat build/$(1).log; exit 1; }
	@cmake --build build/$(1) -j $(JOBS) $(2)
endef

setup: setup-base

setup-%:
	@tools/setup.sh base $*
	@mkdir -p build

release: setup
	$(call build,release)

# A long text, a fact in its middle, four ranks that share the cache.
run: setup
	$(call build,release,--target kvspan_program needle_prompt)
	@tools/demo.sh $(RELEASE) $(TOKENS)

check: setup
	$(call build,release,--target kvspan_program)
	@echo
	@echo "Every kernel variant this machine can run, against an independent double-precision"
	@echo "oracle; the column 'worst' is the largest error as a share of what is allowed."
	$(RELEASE)/kvspan check --quick
	@echo
	@echo "How fast sparse attention is, then a short case of every op: the column 'ceiling' is the"
	@echo "speed as a share of what this machine can do, measured just before. Results are checked."
	$(RELEASE)/kvspan bench attn --batch 8 --q 1 --heads 16,128 --len 32768 --topk 2048 \
		--kv bf16,fp8_ds_mla --reps 5
	@echo
	$(RELEASE)/kvspan bench

test: release
	ctest --preset release -j $(JOBS)

asan ubsan: setup
	$(call build,$@)
	ctest --preset $@ -L fast -j $(JOBS)

# What one thread computes for long tells the thread sanitizer nothing.
tsan: setup
	$(call build,$@)
	ctest --preset $@ -L fast -LE heavy -j $(JOBS)

mpi: setup-mpi
	$(call build,mpi,--target mpi_targets kvspan_program)
	ctest --preset mpi -L mpi

# What needs no GPU; tools/gpu.sh is for a machine with one.
cuda: setup
	$(call build,cuda,--target cuda_targets)
	ctest --preset cuda -R '^(kern|cuda_scratch|dev_host|dev_cuda|check_cuda|cuda_cmd|product_(symbols|clash|install|complete)|hdr_cuda_.*)$$'

fuzz: setup-fuzz
	$(call build,fuzz,--target fuzz_targets)
	@tools/fuzz.sh build/fuzz $(FUZZ_SECONDS)

valgrind: setup-valgrind
	$(call build,debug,--target valgrind_targets)
	@tools/valgrind.sh build/debug

install: setup
	$(call build,release,--target libkvspan.so kvspan_archive kvspan_program)
	cmake --install $(RELEASE) --prefix $(PREFIX)

format: setup-format
	git ls-files '*.c' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

clean:
	rm -rf build

.PHONY: help setup release run check test asan ubsan tsan mpi cuda fuzz valgrind install format clean
