"""Settings for every test: strict promotion, several devices, little compilation."""

import os

# Read once, when JAX starts its backend: before the import below.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # The tests already run in one process a core.
        "--xla_cpu_multi_thread_eigen=false",
        # They compile more than they run: five times as fast without optimisation. `make test`
        # runs some of them once more, as users' programs are compiled.
        "" if "LNB_TEST_OPTIMISED" in os.environ else "--xla_backend_optimization_level=0",
    ]
)

# So does LAPACK, whose threads would wait for each other by spinning.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs from one run to the next, beside pytest's own cache."""
    assert config.cache is not None
    jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(autouse=True)
def strict():
    """No silent promotion in tests; examples in docstrings run as a user would run them."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forgets what a file of tests has compiled. All of it together would take gigabytes, and more
    mappings of memory than Linux grants to a process."""
    yield
    jax.clear_caches()


@pytest.fixture
def x64():
    """Runs a test in float64."""
    with jax.enable_x64(True):
        yield
