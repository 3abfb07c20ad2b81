"""Events in words: names for places, how often a corpus is read."""

import pytest

from jobs import local_roster
from thinwire.link.peer import WorkerId
from thinwire.link.roster import Roster
from thinwire.metrics.news import named, tell

CORPUS = {"corpus": 3_209_971, "tokens_per_step": 8192, "steps": 400, "passes": 0.5, "limited": False}


def test_places_get_the_names_that_the_roster_has(identities):
    roster = local_roster(identities, 2, standbys=1)
    first, second = roster.workers.values()
    called = Roster.of([first, type(second)(second.id, second.certificate, second.address, "barn")], roster.standbys)
    text = "replica 0 stage 1 and replica 0 stage 0, standby 0 at 127.0.0.1:1, replica 7 stage 9"
    assert named(text, called.called) == "barn (stage 1) and replica 0 stage 0, standby 0 at 127.0.0.1:1, replica 7 stage 9"
    assert WorkerId(0, 1) in called.workers


def test_a_corpus_that_is_read_more_than_once_is_a_warning():
    assert tell(CORPUS) == "corpus: 3,209,971 training tokens; 400 steps of 8,192 tokens read it 0.50 times"
    text = tell(CORPUS | {"passes": 4.0, "limited": True})
    assert "at most 400 steps" in text and "warning: that is more than one pass: from step 100 on" in text and "--train.steps 100" in text


@pytest.mark.parametrize("count, words", [(0, ""), (1, "; 1 step is done again"), (9, "; 9 steps are done again")])
def test_a_replay_is_told_with_what_is_done_again(count, words):
    assert tell({"restored": 4, "epoch": 1, "again": count}) == f"all stages go on from step 4{words}"


def test_what_people_need_not_know_has_no_words():
    assert tell({"alive": True}) is None
