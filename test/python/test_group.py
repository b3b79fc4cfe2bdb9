# SPDX-License-Identifier: Apache-2.0
"""Groups: how ranks meet, what a lost rank does, and what a watchdog says."""
import datetime
import os
import tempfile
import threading
import time
import unittest

import ranks
import torch
import torch.distributed as dist
from ranks import random, run

import perseus


def multiply(group):
    return perseus.all_gather_matmul(random(group.rank, 64, 64), random(0, 96, 64).t(), group)


class Meeting(unittest.TestCase):
    def over(self, stores):
        """Two ranks that meet by the stores that are given."""
        results, failures = [None] * 2, []

        def one(rank):
            try:
                group = perseus.init((stores[rank], rank, 2), name=f"{id(stores)}", device=rank, timeout_ms=60000,
                                     watchdog=False)
                results[rank] = multiply(group)
                group.close()
            except BaseException as e:
                failures.append(e)
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertTrue(torch.equal(*results))

    def test_ranks_meet_by_any_store(self):
        limit = datetime.timedelta(seconds=60)
        with self.subTest("HashStore"):
            self.over([dist.HashStore()] * 2)
        with self.subTest("FileStore"), tempfile.TemporaryDirectory() as folder:
            self.over([dist.FileStore(os.path.join(folder, "store"), 2) for _ in range(2)])
        with self.subTest("TCPStore"):
            server = dist.TCPStore("127.0.0.1", 0, 2, True, limit, wait_for_workers=False)
            self.over([server, dist.TCPStore("127.0.0.1", server.port, 2, False, limit)])

    def test_a_group_that_is_opened_again_meets_anew(self):
        def body(group):
            first = multiply(group)
            group.close()
            again = perseus.init(group.process_group, device=group.rank, watchdog=False)
            self.assertIsNot(again, group)
            second = multiply(again)
            again.close()
            return torch.equal(first, second)
        self.assertEqual(run(2, body), [True, True])

    def test_init_returns_the_open_group_and_ops_find_it_by_name_or_process_group(self):
        def body(group):
            self.assertIs(perseus.init(group.process_group), group)
            self.assertIs(perseus.find(group.name), group)
            self.assertIs(perseus.find(group.process_group), group)
        run(2, body)

    def test_old_keys_leave_the_store(self):
        store = dist.HashStore()

        def body(rank):
            from perseus._bootstrap import StoreExchange
            exchange = StoreExchange(store, "t", rank, 2)
            import ctypes
            mine, everyone = ctypes.create_string_buffer(b"%d\0ab" % rank, 4), ctypes.create_string_buffer(8)
            for _ in range(20):
                assert exchange.callback(None, ctypes.addressof(mine), ctypes.addressof(everyone),
                                         4) == 0, exchange.failure
                assert everyone.raw == b"0\0ab1\0ab"
        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertLessEqual(store.num_keys(), 4)

    def test_a_rank_that_does_not_come_is_an_error_and_no_hang(self):
        store = dist.HashStore()
        store.set_timeout(datetime.timedelta(seconds=1))
        with self.assertRaisesRegex(perseus.PerseusError,
                                    "rank 0 of group alone: rank 1 did not come within 1 s") as caught:
            perseus.init((store, 0, 2), name="alone", watchdog=False)
        self.assertEqual(caught.exception.rank, 1)
        with self.assertRaisesRegex(perseus.PerseusError, "rank 1 of group alone: rank 0 did not come within 0.3 s"):
            perseus.init((store, 1, 2), name="alone", timeout_ms=300, watchdog=False)

    def test_many_missing_ranks_are_not_all_listed(self):
        with self.assertRaisesRegex(perseus.PerseusError, "ranks 1, 2, .*, 16 and 83 more did not come") as caught:
            perseus.init((dist.HashStore(), 0, 100), name="many", timeout_ms=100, watchdog=False)
        self.assertEqual(caught.exception.rank, 1)

    def test_wrong_arguments_of_init_are_named(self):
        store = dist.HashStore()
        for given, error, text in (((store, "0", 2), TypeError, "the rank of .* is '0', of type str"),
                                   ((store, 0, None), TypeError, "the world of .* is None, of type NoneType"),
                                   ((store, 0, 0), perseus.PerseusError, "a group of 0 ranks: at least 1"),
                                   (("store", 0, 2), TypeError, "the store of .* is of type str; it must be")):
            with self.subTest(text), self.assertRaisesRegex(error, text):
                perseus.init(given, watchdog=False)
        for limit, error in ((-1, ValueError), (1 << 40, ValueError), (1.5, TypeError), ("1s", TypeError)):
            with self.subTest(limit), self.assertRaisesRegex(error, f"perseus.init: timeout_ms is {limit!r}"):
                perseus.init((store, 0, 1), timeout_ms=limit, watchdog=False)

    def test_there_must_be_a_group(self):
        with self.assertRaisesRegex(perseus.PerseusError, "init_process_group"):
            perseus.init()


def threads(world, body, limit_s=120):
    """What body(number) returns on each thread, or the exception."""
    results = [None] * world

    def one(number):
        try:
            results[number] = body(number)
        except BaseException as e:
            results[number] = e
    started = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(world)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(limit_s)
    return results


def rows_of(group):
    """What each rank put into an all-gather, by rank."""
    y = perseus.all_gather_matmul(torch.full((32, 64), group.rank + 1.0 + 10 * group.kind, dtype=torch.bfloat16),
                                  torch.eye(64, dtype=torch.bfloat16), group)
    return y[::32, 0].tolist()


class Identity(unittest.TestCase):
    """A context belongs to one group: its members, its store or process group, and its name."""

    def opened(self, store, rank, world=2, name=None, device=None, kind=0, **more):
        group = perseus.init((store, rank, world), name=name, device=rank if device is None else device,
                             timeout_ms=60000, watchdog=False, **more)
        group.kind = kind
        return group

    def test_groups_of_one_store_do_not_meet(self):
        store = dist.HashStore()

        def body(number):
            group = self.opened(store, number % 2, name=f"tp{number // 2}", device=number, kind=number // 2)
            rows = rows_of(group)
            group.close()
            return rows
        self.assertEqual(threads(4, body), [[1, 2], [1, 2], [11, 12], [11, 12]])

    def test_threads_that_take_the_default_name_meet(self):
        store = dist.HashStore()

        def body(rank):
            group = self.opened(store, rank)
            rows = rows_of(group), rows_of(perseus.find("perseus")) if rank == 0 else rows_of(group)
            self.assertIs(perseus.find("perseus"), group)
            group.close()
            return rows
        self.assertEqual(threads(2, body), [([1, 2], [1, 2])] * 2)

    def test_a_process_group_that_is_made_anew_gets_a_context_of_its_own(self):
        stores = [dist.HashStore(), dist.HashStore()]

        def body(thread):
            rows, made = [], []
            for store, rank in zip(stores, (thread, 1 - thread)):
                process_group = ranks.gloo(store, rank, 2, f"anew-{thread}")
                made.append(perseus.init(process_group, device=thread, watchdog=False))
                made[-1].kind = 0
                self.assertEqual(made[-1].rank, rank)
                self.assertIs(perseus.find(process_group), made[-1])
                self.assertIs(perseus.find(f"anew-{thread}"), made[-1])
                rows.append(rows_of(made[-1]))
            with self.assertRaisesRegex(perseus.PerseusError, "closed"):
                multiply(made[0])
            made[1].close()
            return rows
        self.assertEqual(threads(2, body), [[[1, 2], [1, 2]]] * 2)

    def test_the_default_group_of_torch_after_destroy_and_init(self):
        for port in (0, 0):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            group = perseus.init(device=0, watchdog=False)
            self.assertIs(group.process_group, dist.group.WORLD)
            self.assertIs(perseus.find(group.name), group)
            dist.destroy_process_group()
        with self.assertRaisesRegex(perseus.PerseusError, f"group {group.name}: its process group was destroyed"):
            torch.ops.perseus.all_gather_matmul(random(0, 32, 64), random(0, 64, 64), group.name)
        with self.assertRaisesRegex(perseus.PerseusError, "closed"):
            perseus.all_gather_matmul(random(0, 32, 64), random(0, 64, 64), group)

    def test_layers_whose_ranks_torch_does_not_know_are_refused_where_it_would_save_them(self):
        store = dist.HashStore()

        def body(rank):
            group = perseus.init((store, rank, 2), device=rank, name="of a store", watchdog=False)
            with self.assertRaisesRegex(perseus.PerseusError, "does not know the ranks of group of a store"):
                perseus.nn.RowParallelLinear(64, 32, group=group)
            group.close()
            return True
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            self.assertEqual(threads(2, body), [True, True])
        finally:
            dist.destroy_process_group()

    def test_a_name_that_means_another_group_is_refused(self):
        store = dist.HashStore()
        first = self.opened(store, 0, 1)
        self.assertIs(self.opened(store, 0, 1), first)
        for other, says in (((store, 0, 2), "rank 0 of 1, and is asked for as rank 0 of 2"),
                            ((store, 1, 2), "rank 0 of 1, and is asked for as rank 1 of 2"),
                            ((dist.HashStore(), 0, 1), "that of another store"),
                            (ranks.gloo(store, 0, 1, "perseus"), "that of another process group")):
            wanted = f"the name 'perseus' is open here as {says}: close.* or give name="
            with self.subTest(says), self.assertRaisesRegex(perseus.PerseusError, wanted):
                perseus.init(other, device=0, watchdog=False)
        first.close()
        with self.assertRaisesRegex(perseus.PerseusError, "its 2 ranks are 0 to 1"):
            perseus.init((store, 2, 2))
        with self.assertRaisesRegex(TypeError, r"a tuple of 2 was given; it must be \(store, rank, world\)"):
            perseus.init((store, 0))
        for call in (lambda: perseus.init(5), lambda: perseus.matmul_all_reduce(torch.ones(8, 8), torch.ones(8, 8), 5)):
            with self.assertRaisesRegex(TypeError, "a group was given as int; it must be a ProcessGroup, a DeviceMesh"):
                call()

    def test_a_rank_that_failed_before_it_came_may_try_again(self):
        store = dist.HashStore()

        def body(rank):
            if rank == 1:  # ranks do not count how often they have tried
                for _ in range(3):
                    with self.assertRaises(perseus.PerseusError):
                        perseus.init((store, 1, 2), name="again", device=99999, timeout_ms=100, watchdog=False)
            group = self.opened(store, rank, name="again")
            rows = rows_of(group)
            group.close()
            return rows
        self.assertEqual(threads(2, body), [[1, 2]] * 2)

    def test_a_replaced_rank_meets_the_others_when_they_open_again_and_is_told_so_before(self):
        store = dist.HashStore()

        def body(rank):
            group = self.opened(store, rank, name="replaced")
            if rank == 1:  # ends without a word: another process comes as rank 1
                group.abort()
                group.close()
                with self.assertRaisesRegex(perseus.PerseusError, "rank 0 did not come within 0.5 s. The group has "
                                                                  "been opened before, with rank 0: process .* every "
                                                                  "other rank must close") as caught:
                    perseus.init((store, 1, 2), name="replaced", device=1, timeout_ms=500, watchdog=False)
                self.assertEqual(caught.exception.rank, 0)
            else:
                group.abort()
                time.sleep(1.5)
                group.close()
            group = self.opened(store, rank, name="replaced")
            rows = rows_of(group)
            group.close()
            return rows
        self.assertEqual(threads(2, body), [[1, 2]] * 2)

    def test_two_processes_that_come_as_one_rank_are_told(self):
        store = dist.HashStore()

        def body(number):
            from perseus._bootstrap import identity, rendezvous
            time.sleep(0.3 * number)
            return rendezvous(store, identity("twice", 2, None), "twice", 0, 2, 2)
        first, second = threads(2, body)
        self.assertRegex(str(first), "group twice: process .* has come as rank 0, which is this one")
        self.assertRegex(str(second), "rank 1 did not come within 2 s")


class Late(unittest.TestCase):
    """Waits for plans end within timeout_ms, and name the rank, the op and its sizes."""

    def test_a_rank_that_opens_no_plan(self):
        ended = threading.Event()

        def body(group):
            if group.rank == 2:
                ended.wait(60)
                return None
            began = time.monotonic()
            try:
                perseus.matmul_all_reduce(random(group.rank, 64, 64), random(0, 96, 64).t(), group)
            except perseus.PerseusError as e:
                return e.rank, str(e), time.monotonic() - began
            finally:
                if group.rank == 0:
                    time.sleep(1)
                    ended.set()
        results = run(3, body, timeout_ms=2000)
        for rank, text, took in results[:2]:
            self.assertEqual(rank, 2)
            self.assertRegex(text, "plan of matmul_all_reduce with at most 96 rows, n 96, k 64: rank . of group .*rank "
                                   "2 did not come within 2 s")
            self.assertLess(took, 10)

    def test_the_watchdogs_error_ends_the_opening_of_a_plan(self):
        """A kernel of rank 0 gives up waiting for rank 1, while rank 0 opens a plan. Its timeout_ms is long, so only
        the error can end that."""
        ended = threading.Event()

        def one(group):
            if group.rank == 1:
                multiply(group)
                ended.wait(60)
                return None
            multiply(group)
            group.exchange.limit_s = 600
            from perseus.watchdog import raise_in_its_thread
            error = perseus.PerseusError("the network failed", -5, 1)
            threading.Timer(1, raise_in_its_thread, (group, error)).start()
            began = time.monotonic()
            try:
                perseus.matmul_all_reduce(random(0, 64, 64), random(0, 96, 64).t(), group)
            except perseus.PerseusError as e:
                return e.rank, str(e), time.monotonic() - began
            finally:
                ended.set()
        rank, text, took = run(2, one)[0]
        self.assertEqual(rank, 1)
        self.assertRegex(text, "plan of matmul_all_reduce.*the network failed")
        self.assertLess(took, 20)

    def test_what_one_rank_found_ends_the_waits_of_the_others(self):
        from perseus._bootstrap import StoreExchange
        store = dist.HashStore()

        def body(rank):
            import ctypes
            exchange = StoreExchange(store, "t", rank, 3, 0.3 if rank == 0 else 60)
            mine, everyone = ctypes.create_string_buffer(4), ctypes.create_string_buffer(12)
            if rank < 2:
                self.assertNotEqual(exchange.callback(None, ctypes.addressof(mine), ctypes.addressof(everyone), 4), 0)
                return exchange.failure.rank, str(exchange.failure)
        began = time.monotonic()
        first, second, _ = threads(3, body)
        self.assertEqual(first, (2, "rank 2 did not come within 0.3 s"))
        self.assertEqual(second, (2, "rank 0 gave up: rank 2 did not come within 0.3 s"))
        self.assertLess(time.monotonic() - began, 20)

    def test_memory_that_torch_keeps_is_freed_when_a_plan_finds_none(self):
        def body(group):
            real, calls = group.library.prs_gemm_plan_open, []

            def full(*arguments):
                calls.append("open")
                return -12 if len(calls) == 1 else real(*arguments)
            group.place.free_cache = lambda: calls.append("free")
            group.library = type("Full", (), {"__getattr__": lambda self, name: full if name == "prs_gemm_plan_open"
                                              else getattr(perseus.library(), name)})()
            multiply(group)
            return calls
        self.assertEqual(run(2, body), [["open", "free", "open"]] * 2)

    def test_a_group_that_slept_goes_on_with_what_was_open(self):
        def body(group):
            before, held = multiply(group), group.memory()[0]
            with self.assertRaisesRegex(perseus.PerseusError, "is not asleep"):
                group.wake()
            group.sleep()
            self.assertEqual(group.memory()[0], 0)
            for call in (lambda: multiply(group), lambda: perseus.all_reduce(random(0, 8, 64), group), group.sleep):
                with self.assertRaisesRegex(perseus.PerseusError, "is asleep"):
                    call()
            group.wake()
            self.assertEqual(group.memory()[0], held)
            return torch.equal(multiply(group), before)
        self.assertEqual(run(2, body, sleeps=True), [True] * 2)

    def test_a_group_that_was_opened_without_sleeps_says_so(self):
        def body(group):
            with self.assertWarnsRegex(UserWarning, "without sleeps"):
                perseus.init(group.process_group, sleeps=True)
            with self.assertRaisesRegex(perseus.PerseusError, "opened without `sleeps`"):
                group.sleep()
        run(1, body)


class Lost(unittest.TestCase):
    """Rank 1 has both plans but does not launch: rank 0 waits until its limit."""

    def lose(self, watchdog, body):
        ended = threading.Event()

        def one(group):
            if group.rank == 1:
                multiply(group)
                ended.wait(60)
                return None
            try:
                multiply(group)
                return body(group)
            finally:
                ended.set()
        return run(2, one, watchdog=watchdog, timeout_ms=2000)[0]

    def test_the_next_call_raises_an_error_that_names_the_rank(self):
        def body(group):
            with self.assertRaises(perseus.PerseusError) as caught:
                multiply(group)
                group.check()
            return caught.exception.rank, str(caught.exception)
        rank, text = self.lose(False, body)
        self.assertEqual(rank, 1)
        self.assertRegex(text, "rank 1")

    def test_the_watchdog_raises_it_in_the_thread_that_opened_the_group(self):
        def body(group):
            began = time.monotonic()
            try:
                multiply(group)
                while time.monotonic() - began < 30:
                    time.sleep(0.01)
            except perseus.PerseusError as e:
                return e.rank, time.monotonic() - began
            return None, 0
        rank, took = self.lose(True, body)
        self.assertEqual(rank, 1)
        self.assertLess(took, 20)

    def test_abort_ends_the_wait_of_a_kernel_at_once(self):
        def body(group):
            threading.Timer(0.5, group.abort).start()
            began = time.monotonic()
            with self.assertRaises(perseus.PerseusError):
                multiply(group)
                group.check()
            return time.monotonic() - began
        ended = threading.Event()

        def one(group):
            if group.rank == 1:
                multiply(group)
                ended.wait(60)
                return None
            try:
                multiply(group)
                return body(group)
            finally:
                ended.set()
        self.assertLess(run(2, one, timeout_ms=60000)[0], 20)

    def test_survivors_go_on_in_a_smaller_group(self):
        def body(group):
            with self.assertRaises(perseus.PerseusError):
                multiply(group)
                group.check()
            group.close()
            smaller = perseus.init((dist.HashStore(), 0, 1), name="smaller", device=0, watchdog=False)
            c = multiply(smaller)
            smaller.close()
            return c.shape
        self.assertEqual(self.lose(False, body), (64, 96))


if __name__ == "__main__":
    ranks.main()
