"""What needs a fresh interpreter: other processes' programs, missing parts, and the end of the process."""

from __future__ import annotations

import textwrap

PLAN = textwrap.dedent(
    """
    import sys, time, jax, jax.numpy as jnp
    from jax_mxfp4_moe.implementations import torch_call as t
    spec = (t.BufferSpec((4,), "float32"),)
    def run(inputs, outputs, workspace):
        outputs[0].copy_(inputs[0] * 2)
    def through(x):
        return t.call(t.Plan("process", ("key", 1), run, spec, spec), x + 1)[0]
    x = jnp.arange(4.0)
    """
)


def test_t4_a_program_of_another_process_names_the_missing_plan(python, tmp_path):
    path = str(tmp_path / "program")
    made = python(
        PLAN
        + textwrap.dedent(
            """
            import pickle
            from jax.experimental import serialize_executable
            compiled = jax.jit(through).lower(x).compile()
            pickle.dump(serialize_executable.serialize(compiled), open(sys.argv[1], "wb"))
            """
        ),
        path,
    )
    assert made.returncode == 0, made.stderr
    used = python(
        PLAN
        + textwrap.dedent(
            """
            import pickle
            from jax.experimental import serialize_executable
            program = pickle.load(open(sys.argv[1], "rb"))
            assert t.why_not("eager") is None
            def load_and_run():
                return serialize_executable.deserialize_and_load(*program)(x)
            try:
                load_and_run()
            except Exception as error:
                print("ERROR", error)
            print("TRACED", through(x))
            print("THEN", load_and_run())
            """
        ),
        path,
    )
    assert used.returncode == 0, used.stderr
    assert "calls plan 'process' (id" in used.stdout
    assert "trace the function again" in used.stdout
    assert "TRACED [2. 4. 6. 8.]" in used.stdout
    assert "THEN [2. 4. 6. 8.]" in used.stdout


def test_t4_the_persistent_compilation_cache_finds_the_plan_again(python, tmp_path):
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    program = PLAN + textwrap.dedent(
        """
        hits = []
        jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hit" in event else None)
        print(jax.jit(through)(x), "HITS", len(hits))
        """
    )
    first, second = python(program, **environment), python(program, **environment)
    assert "[2. 4. 6. 8.] HITS 0" in first.stdout, first.stderr
    assert "[2. 4. 6. 8.] HITS" in second.stdout, second.stderr
    assert "HITS 0" not in second.stdout


def test_t2_a_missing_extension_says_so(python):
    program = (
        textwrap.dedent(
            """
            import sys
            sys.modules["jax_mxfp4_moe._bridge"] = None  # what a wheel without the extension looks like
            """
        )
        + PLAN
        + "print(jax.jit(through)(x), jax.jit(lambda x: through(x) + 0)(x), t.why_not('eager'))"
    )
    done = python(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("[2. 4. 6. 8.]") == 2
    assert "jax_mxfp4_moe._bridge cannot be loaded" in done.stdout
    assert done.stderr.count("BridgeFallbackWarning") == 1


def test_t17_t36_handlers_on_the_runtimes_own_threads(python):
    """Two devices: XLA calls on threads that Python did not start, both at once, and the process ends cleanly."""
    program = PLAN + textwrap.dedent(
        """
        import threading
        from jax.sharding import NamedSharding, PartitionSpec
        seen, together = set(), threading.Barrier(2, timeout=60)
        def run(inputs, outputs, workspace):
            together.wait()  # both are inside
            seen.add(threading.get_ident())
            outputs[0].copy_(inputs[0] * 2)
        plan = t.Plan("threads", 0, run, spec, spec)
        mesh = jax.make_mesh((2,), ("devices",))
        sharded = jax.shard_map(lambda x: t.call(plan, x)[0], mesh=mesh, in_specs=PartitionSpec("devices"),
                                out_specs=PartitionSpec("devices"), check_vma=False)
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("devices")))
        for _ in range(3):
            x = jax.jit(sharded)(x)
        print(x, len(seen) >= 2, threading.get_ident() in seen)
        jax.jit(sharded)(x)
        """
    )
    done = python(program, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert done.returncode == 0, done.stderr
    assert "[ 0.  8. 16. 24. 32. 40. 48. 56.] True False" in done.stdout
    assert not done.stderr


def test_t36_closing_waits_for_a_call_that_is_inside(python):
    program = PLAN.replace("outputs[0].copy_", "inside.set(); time.sleep(0.3); left.append(1); outputs[0].copy_")
    program += textwrap.dedent(
        """
        import threading
        inside, left = threading.Event(), []
        thread = threading.Thread(target=lambda: print(through(x)))
        thread.start()
        inside.wait()
        t._close()
        print("LEFT", left)
        thread.join()
        """
    )
    done = python(program)
    assert done.returncode == 0, done.stderr
    assert "LEFT [1]" in done.stdout
    assert "[2. 4. 6. 8.]" in done.stdout


def test_t36_after_closing_a_call_is_an_error_and_not_a_crash(python):
    done = python(
        PLAN
        + textwrap.dedent(
            """
            print(through(x))
            t._close()
            try:
                print(through(x))
            except Exception as error:
                print("ERROR", error)
            """
        )
    )
    assert done.returncode == 0
    assert "ERROR CANCELLED: jax_mxfp4_moe: plan 'process': the Python interpreter" in done.stdout


def test_importing_the_module_loads_no_torch_and_no_extension(python):
    done = python(
        "import sys, jax_mxfp4_moe.implementations.torch_call\n"
        "print([name for name in ('torch', 'jax_mxfp4_moe._bridge') if name in sys.modules])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
