"""The tuple of block ids is the same object until the table changes."""

from octavo.core.block_table import BlockTable


def test_ids_keep_their_identity_until_the_table_changes() -> None:
    table = BlockTable()
    assert table.ids == ()
    table.extend([[4]])
    table.extend([[7, 9]])
    ids = table.ids
    assert ids == ((4, 7, 9),)
    assert table.ids is ids
    table.replace(0, 2, 5)
    assert table.ids == ((4, 7, 5),)
    assert len(table) == table.num_held == 3


def test_a_fork_has_the_same_ids_and_its_own_future() -> None:
    table = BlockTable()
    table.extend([[4, 7], [5, 8]])
    table.num_published = 1
    child = table.fork()
    assert child.ids is table.ids
    assert child.num_published == 1
    child.extend([[8], [9]])
    assert child.drop_front(1, 1) == [5]
    assert table.ids == ((4, 7), (5, 8))
    assert child.ids == ((4, 7, 8), (0, 8, 9))


def test_clear_returns_what_was_held() -> None:
    table = BlockTable()
    table.extend([[4, 7]])
    assert table.clear() == [4, 7]
    assert table.ids == ()
    assert len(table) == table.num_held == table.num_published == 0


def test_the_null_block_takes_the_place_of_dropped_ones() -> None:
    table = BlockTable()
    table.extend([[1, 3, 5, 7], [2, 4, 6, 8]])
    ids = table.ids
    assert table.drop_front(1, 0) == []
    assert table.ids is ids
    assert table.drop_front(1, 2) == [2, 4]
    assert table.drop_front(1, 2) == []
    assert table.drop_front(1, 3) == [6]
    assert table.ids == ((1, 3, 5, 7), (0, 0, 0, 8))
    assert table.first == [0, 3]
    assert (len(table), table.num_held) == (4, 5)
    assert table.held() == [1, 3, 5, 7, 8]
    assert table.clear() == [1, 3, 5, 7, 8]
