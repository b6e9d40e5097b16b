"""The order of the tests over several processes, which decides when the last of them is done."""

import pytest
from ordering import longest_first


class Item:
    def __init__(self, number, long):
        self.number, self.long = number, long

    def get_closest_marker(self, name):
        return self.long if name == "timeout" else None


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("long", [(), (19,), (3, 4, 18, 19), tuple(range(20))])
def test_each_process_begins_with_its_part_of_the_long_ones(processes, long):
    items = [Item(i, i in long) for i in range(20)]
    ordered = longest_first(items, processes)
    assert sorted(x.number for x in ordered) == list(range(20))
    if processes == 1:
        assert ordered == items
        return
    start, left = 0, 20
    for i in range(processes):  # as worksteal deals them out
        share = ordered[start : start + left // (processes - i)]
        kinds = [x.long for x in share]
        assert kinds == sorted(kinds, reverse=True)
        assert abs(sum(kinds) - len(long) / processes) < 1
        start, left = start + len(share), left - len(share)
