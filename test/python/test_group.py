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
                group = perseus.init((stores[rank], rank, 2), name=f"{id(stores)}-{rank}", watchdog=False)
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
                assert exchange.callback(None, ctypes.addressof(mine), ctypes.addressof(everyone), 4) == 0, exchange.failure
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
        with self.assertRaisesRegex(perseus.PerseusError, "rank 0 of group alone: the ranks could not meet: .*") as caught:
            perseus.init((store, 0, 2), name="alone", watchdog=False)
        self.assertIsNotNone(caught.exception.__cause__)

    def test_there_must_be_a_group(self):
        with self.assertRaisesRegex(perseus.PerseusError, "init_process_group"):
            perseus.init()


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
