use super::{Ledger, Wakes};
use crate::PauseReason;
use crate::store::{
    Chunk, Epoch, Grant, HolderId, Limits, News, Quantity, RateLimit, RateReport, Report, ScopeGrant, Terms,
};
use proptest::prelude::*;

/// One process: a client that believes all it is told.
struct Process {
    report: Report,
    grant: Option<Grant>,
}

/// A fleet, its book and its clock.
struct Fleet {
    ledger: Ledger,
    now: u64,
    offers: u64,
    all: Vec<Process>,
    wakes: Wakes,
}

impl Fleet {
    /// So many processes, that know each other: nothing is learned any more.
    fn of(n: u128, limits: &Limits) -> Self {
        let mut fleet = Fleet {
            ledger: Ledger::new(false),
            now: 1_000_000,
            offers: 0,
            all: Vec::new(),
            wakes: Wakes::Holders(Vec::new()),
        };
        for id in 1..=n {
            let mut report = Report::new(HolderId(id), Epoch(0));
            report.limits = limits.clone();
            (report.seq, report.headroom) = (0, 0);
            report.terms = Terms { keep: 0.0, ..Terms::default() };
            fleet.all.push(Process { report, grant: None });
        }
        for i in 0..fleet.all.len() {
            fleet.tell(i);
        }
        fleet
    }

    /// Exchanges; what it lacks and holds is as in its report, news are told once.
    fn tell(&mut self, i: usize) -> Grant {
        self.offers += 1;
        let process = &mut self.all[i];
        process.report.seq += 1;
        process.report.offer = Epoch(self.offers);
        if let Some(grant) = &process.grant {
            process.report.epoch = Some(grant.epoch);
            process.report.version = grant.version;
        }
        let (grant, wakes) = self.ledger.exchange(self.now, "", &process.report);
        process.report.news.clear();
        process.report.served = 0;
        process.report.held = grant.slots;
        self.wakes = wakes;
        process.grant = Some(grant.clone());
        grant
    }

    fn news(&mut self, i: usize, news: News) -> Grant {
        self.all[i].report.news.push(news);
        self.tell(i)
    }

    /// It needs so many from now on, and tells.
    fn need(&mut self, i: usize, need: u32) -> Grant {
        self.all[i].report.need = need;
        self.tell(i)
    }

    /// All slots that it has are in use.
    fn fill(&mut self, i: usize) {
        let report = &mut self.all[i].report;
        report.busy = report.held.min(report.need);
    }

    fn wait(&mut self, ms: u64) {
        self.now += ms;
    }

    /// Time goes by, and all renew once a second.
    fn renew(&mut self, ms: u64) {
        for _ in 0..ms / 1000 {
            self.wait(1000);
            for i in 0..self.all.len() {
                self.tell(i);
            }
        }
        self.wait(ms % 1000);
    }

    fn charges(&self) -> u64 {
        let book = self.ledger.book.as_ref().expect("a book");
        book.records.values().map(|record| record.charge).sum()
    }
}

fn ceiling(ceiling: u32) -> Limits {
    Limits { ceiling: Some(ceiling), ..Limits::default() }
}

fn root(grant: &Grant) -> &ScopeGrant {
    grant.scopes.iter().find(|scope| scope.scope.is_none()).expect("the provider's own scope")
}

// One that was stopped for longer than its lease comes back with calls in flight: they are counted, and as they end
// nobody may take their places, which others have by now. So is a report that was long under way.
#[test]
fn what_is_charged_beyond_the_ceiling_is_not_there_to_be_used() {
    let mut fleet = Fleet::of(2, &ceiling(6));
    assert_eq!(fleet.need(0, 6).slots, 6);
    fleet.fill(0);
    fleet.all[1].report.need = 6;
    for _ in 0..11 {
        fleet.wait(1000);
        fleet.tell(1);
    }
    assert_eq!(fleet.tell(1).slots, 6, "the first one's lease has run out");
    fleet.fill(1);
    let late = fleet.tell(0);
    assert_eq!((fleet.charges(), late.slots, late.target, late.contended), (12, 0, 3, true));
    fleet.all[0].report.busy = 2;
    assert_eq!((fleet.tell(0).slots, fleet.charges()), (0, 8));
    // A cut is the same: what is in flight is, and no slot above the new ceiling is used once more.
    fleet.all[0].report.busy = 0;
    assert_eq!((fleet.tell(0).slots, fleet.charges()), (0, 6));
    for process in &mut fleet.all {
        process.report.limits = ceiling(4);
    }
    fleet.tell(0);
    let cut = fleet.tell(1);
    assert_eq!((cut.slots, cut.ceiling, fleet.charges()), (4, 4, 6));
}

#[test]
fn what_one_returns_the_next_is_woken_for() {
    let mut fleet = Fleet::of(2, &ceiling(4));
    assert_eq!(fleet.need(0, 6).slots, 4);
    fleet.fill(0);
    let other = fleet.need(1, 3);
    assert_eq!((other.slots, other.target), (0, 2), "its part, when there is something");
    assert_eq!(fleet.wakes, Wakes::Holders(vec![]));
    let first = fleet.tell(0);
    assert!(first.contended && first.target == 2 && first.slots == 4, "nothing is taken away");
    fleet.all[0].report.busy = 2;
    fleet.all[0].report.held = 2;
    fleet.tell(0);
    assert_eq!(fleet.wakes, Wakes::Holders(vec![HolderId(2)]));
    assert_eq!(fleet.tell(1).slots, 2);
}

#[test]
fn a_late_report_changes_nothing() {
    let mut fleet = Fleet::of(2, &ceiling(4));
    fleet.need(0, 3);
    let late = Report { seq: 1, held: 0, busy: 9, need: 40, ..fleet.all[0].report.clone() };
    fleet.tell(0);
    let before = fleet.charges();
    let (grant, _) = fleet.ledger.exchange(fleet.now + 10, "", &late);
    assert!(grant.stale);
    assert_eq!((grant.slots, grant.before), (3, fleet.all[0].report.seq));
    assert_eq!(fleet.charges(), before);
}

#[test]
fn after_a_loss_nobody_is_given_more_until_all_leases_are_over() {
    let mut fleet = Fleet::of(2, &ceiling(10));
    fleet.need(0, 10);
    fleet.fill(0);
    fleet.ledger = Ledger::new(true);
    let grant = fleet.need(1, 5);
    assert_eq!((grant.slots, grant.learning), (0, 10_000));
    let grant = fleet.tell(0);
    assert_eq!(grant.slots, 10, "what it holds by the lost book");
    fleet.renew(9000);
    assert_eq!(fleet.tell(1).slots, 0);
    fleet.all[0].report.held = 5;
    fleet.all[0].report.busy = 5;
    fleet.renew(2000);
    assert_eq!(fleet.tell(1).slots, 5);
}

#[test]
fn a_hint_stops_all_and_ends_in_a_ramp() {
    let mut fleet = Fleet::of(2, &ceiling(60));
    fleet.need(0, 40);
    let hint = News::Paused { scope: None, wait: 5000, reason: PauseReason::Hint };
    let grant = fleet.news(0, hint);
    assert_eq!(fleet.wakes, Wakes::All);
    assert_eq!(root(&grant).pause.expect("paused").wait, 5000);
    fleet.wait(1000);
    let other = fleet.need(1, 40);
    assert_eq!(root(&other).pause.expect("paused").wait, 4000);
    assert!(other.slots <= 1, "nothing is given while paused");
    fleet.all[0].report.held = 0;
    fleet.renew(4000);
    assert_eq!(fleet.tell(1).ceiling, 10);
    fleet.wait(300);
    assert_eq!(fleet.tell(1).ceiling, 35);
    fleet.wait(300);
    assert_eq!(fleet.tell(1).ceiling, 60);
}

// ------------------------------------------------------------------ who holds what

#[test]
fn a_charge_falls_only_when_the_newest_grant_is_known() {
    let mut fleet = Fleet::of(2, &ceiling(4));
    fleet.need(0, 2);
    let known = fleet.all[0].grant.clone();
    // It is given two more, and the answer is lost.
    assert_eq!(fleet.need(0, 4).slots, 4);
    fleet.all[0].grant = known;
    fleet.all[0].report.held = 2;
    assert_eq!(fleet.need(0, 2).slots, 4, "the answer may come yet");
    fleet.all[0].report.held = 2;
    assert_eq!(fleet.tell(0).slots, 2, "it has come, and it holds two");
}

#[test]
fn who_was_not_heard_of_has_nothing_when_its_lease_and_its_calls_are_over() {
    let mut fleet = Fleet::of(2, &ceiling(4));
    for process in &mut fleet.all {
        process.report.terms.extra = 5000;
    }
    fleet.need(0, 4);
    fleet.all[1].report.need = 4;
    for _ in 0..14 {
        fleet.wait(1000);
        assert_eq!(fleet.tell(1).slots, 0);
    }
    fleet.wait(1000);
    let grant = fleet.tell(1);
    assert_eq!((grant.slots, grant.members), (4, 1));
}

#[test]
fn goodbye_frees_all_at_once_and_what_comes_later_is_late() {
    let mut fleet = Fleet::of(2, &ceiling(4));
    fleet.need(0, 4);
    fleet.need(1, 4);
    let late = Report { seq: fleet.all[0].report.seq, ..fleet.all[0].report.clone() };
    (fleet.all[0].report.held, fleet.all[0].report.need, fleet.all[0].report.bye) = (0, 0, true);
    let grant = fleet.tell(0);
    assert_eq!((grant.slots, grant.members), (0, 1));
    assert_eq!(fleet.wakes, Wakes::Holders(vec![HolderId(2)]));
    assert_eq!(fleet.tell(1).slots, 4);
    let (grant, _) = fleet.ledger.exchange(fleet.now, "", &late);
    assert!(grant.stale && grant.slots == 0, "{grant:?}");
}

#[test]
fn goodbye_with_calls_in_flight_keeps_their_slots() {
    let mut fleet = Fleet::of(2, &ceiling(4));
    fleet.need(0, 4);
    let report = &mut fleet.all[0].report;
    (report.held, report.busy, report.need, report.bye) = (3, 3, 3, true);
    assert_eq!(fleet.tell(0).slots, 3);
    assert_eq!(fleet.need(1, 4).slots, 1);
    for _ in 0..10 {
        fleet.wait(1000);
        fleet.tell(1);
    }
    assert_eq!(fleet.tell(1).slots, 4);
}

#[test]
fn what_is_safe_is_kept_for_the_grace_and_the_rest_is_free() {
    let mut fleet = Fleet::of(2, &ceiling(12));
    for process in &mut fleet.all {
        (process.report.terms.keep, process.report.terms.grace) = (0.5, 60_000);
    }
    fleet.tell(1);
    assert_eq!((fleet.need(0, 8).slots, fleet.tell(0).safe), (8, 3), "half of its equal share");
    fleet.all[1].report.need = 12;
    for second in 1..=75 {
        fleet.wait(1000);
        let grant = fleet.tell(1);
        let expected = match second {
            ..10 => 4,
            10..70 => 9,
            _ => 12,
        };
        assert_eq!(grant.slots, expected, "after {second} s");
    }
    fleet.all[0].report.busy = 5;
    let back = fleet.tell(0);
    assert_eq!(
        (back.slots, fleet.charges()),
        (0, 17),
        "what is in flight is real, and no slot to be used again"
    );
}

#[test]
fn a_lower_promise_counts_when_it_was_heard() {
    let mut fleet = Fleet::of(1, &ceiling(12));
    fleet.all[0].report.terms.keep = 1.0;
    assert_eq!(fleet.need(0, 12).safe, 12);
    let known = fleet.all[0].grant.clone();
    let mut other = Report::new(HolderId(9), Epoch(9));
    other.limits = ceiling(12);
    fleet.ledger.exchange(fleet.now, "", &other);
    assert_eq!(fleet.tell(0).safe, 6);
    fleet.all[0].grant = known;
    let safe = |fleet: &Fleet| fleet.ledger.book.as_ref().expect("a book").records[&HolderId(1)].safe;
    fleet.tell(0);
    assert_eq!(safe(&fleet), 12, "it did not hear of six");
    fleet.tell(0);
    assert_eq!(safe(&fleet), 6);
}

#[test]
fn who_comes_after_a_silence_waits_for_all_who_were_there() {
    let mut fleet = Fleet::of(3, &ceiling(10));
    fleet.need(0, 4);
    fleet.need(1, 4);
    fleet.wait(3001);
    let grant = fleet.need(2, 5);
    assert_eq!((grant.slots, grant.learning), (0, 10_000));
    assert_eq!(fleet.tell(0).slots, 4);
    fleet.wait(100);
    assert_eq!(fleet.tell(2).slots, 0);
    fleet.tell(1);
    let grant = fleet.tell(2);
    assert_eq!((grant.slots, grant.learning), (2, 0), "all have reported");
}

#[test]
fn a_silence_of_nobody_is_none() {
    let mut fleet = Fleet::of(2, &ceiling(10));
    for i in 0..2 {
        fleet.all[i].report.bye = true;
        fleet.tell(i);
    }
    fleet.wait(3_600_000);
    fleet.all[0].report.bye = false;
    let grant = fleet.need(0, 5);
    assert_eq!((grant.slots, grant.learning), (5, 0));
}

#[test]
fn no_step_of_the_clock_frees_what_is_held() {
    for step in [-3_600_000_i64, -5000, -500, 5000, 60_000, 3_600_000] {
        let mut fleet = Fleet::of(2, &ceiling(4));
        fleet.need(0, 4);
        fleet.fill(0);
        fleet.all[1].report.need = 4;
        fleet.now = 100_000_000;
        fleet.ledger = Ledger::new(false);
        fleet.tell(0);
        fleet.now = fleet.now.saturating_add_signed(step);
        for second in 0..9 {
            assert_eq!(fleet.tell(1).slots, 0, "{second} s after a step of {step} ms");
            fleet.wait(1000);
        }
    }
}

#[test]
fn a_step_back_delays_and_never_hurries() {
    let mut fleet = Fleet::of(1, &ceiling(4));
    fleet.now = 100_000_000;
    fleet.ledger = Ledger::new(false);
    fleet.news(0, News::Paused { scope: None, wait: 60_000, reason: PauseReason::Hint });
    fleet.now -= 3_600_000;
    assert_eq!(root(&fleet.tell(0)).pause.expect("a pause").wait, 60_000);
    fleet.wait(2000);
    assert_eq!(root(&fleet.tell(0)).pause.expect("a pause").wait, 58_000);
}

#[test]
fn another_life_of_the_store_is_learned_and_keeps_its_pause() {
    let mut fleet = Fleet::of(2, &ceiling(10));
    fleet.need(0, 6);
    fleet.news(0, News::Paused { scope: None, wait: 6 * 3_600_000, reason: PauseReason::Depleted });
    fleet.wait(1000);
    let report = Report { seq: 50, need: 9, offer: Epoch(77), ..fleet.all[1].report.clone() };
    let (grant, _) = fleet.ledger.exchange(fleet.now, "another", &report);
    assert_eq!((grant.epoch, grant.slots, grant.learning), (Epoch(77), 0, 10_000));
    assert_eq!(root(&grant).pause.expect("kept").wait, 6 * 3_600_000 - 1000);
}

#[test]
fn a_version_that_the_book_has_not_reached_is_proof_that_it_is_an_old_one() {
    let mut fleet = Fleet::of(2, &ceiling(10));
    fleet.need(0, 3);
    let replica = fleet.ledger.clone();
    fleet.need(0, 10);
    fleet.fill(0);
    // Promoted, and nobody can tell: the store does not say who it is.
    fleet.ledger = replica;
    let grant = fleet.tell(0);
    assert_eq!((grant.slots, grant.learning), (10, 10_000));
    assert_eq!(fleet.need(1, 5).slots, 0);
}

#[test]
fn some_may_be_given_while_the_book_is_new() {
    let mut fleet = Fleet::of(2, &ceiling(10));
    fleet.ledger = Ledger::new(true);
    for process in &mut fleet.all {
        process.report.terms.trickle = 3;
        process.grant = None;
    }
    assert_eq!(fleet.need(0, 2).slots, 2);
    assert_eq!(fleet.need(1, 2).slots, 1);
}

// ------------------------------------------------------------------ shares

#[test]
fn three_slots_go_round_fifty_processes() {
    let mut fleet = Fleet::of(50, &ceiling(3));
    for i in 0..50 {
        fleet.need(i, 1);
    }
    let mut served = [0_u32; 50];
    let mut calls: Vec<(u64, usize)> = Vec::new();
    let mut idle = 0;
    for tick in 0..30_000_u64 {
        fleet.wait(10);
        // One after the other renews, each about once a second.
        let mut to_tell =
            if tick % 2 == 0 { vec![usize::try_from(tick / 2 % 50).expect("small")] } else { vec![] };
        // A call lasts one second.
        let over = calls.extract_if(.., |(began, _)| *began + 1000 <= fleet.now).map(|(_, i)| i);
        for i in over.collect::<Vec<_>>() {
            served[i] += 1;
            (fleet.all[i].report.held, fleet.all[i].report.busy) = (0, 0);
            to_tell.push(i);
        }
        while let Some(i) = to_tell.pop() {
            let grant = fleet.tell(i);
            if let Wakes::Holders(woken) = &fleet.wakes {
                to_tell.extend(woken.iter().map(|id| usize::try_from(id.0).expect("small") - 1));
            }
            if grant.slots > fleet.all[i].report.busy {
                fleet.all[i].report.busy = 1;
                calls.push((fleet.now, i));
            }
        }
        idle += 3 - calls.len();
    }
    let (least, most) = (served.iter().min().expect("some"), served.iter().max().expect("some"));
    assert!(most - least <= 1, "{served:?}");
    assert!(idle < 900, "of 90000 slot-ticks {idle} were idle");
}

#[test]
fn weights_are_heeded() {
    let mut fleet = Fleet::of(2, &ceiling(12));
    fleet.all[1].report.weight = 3;
    fleet.tell(1);
    assert_eq!((fleet.need(0, 20).target, fleet.need(1, 20).target), (12, 9));
    assert_eq!(fleet.tell(0).target, 3);
}

#[test]
fn the_turn_of_one_that_is_silent_goes_to_the_next() {
    let mut fleet = Fleet::of(3, &ceiling(1));
    for i in 0..3 {
        fleet.need(i, 1);
    }
    fleet.fill(0);
    fleet.wait(1000);
    fleet.tell(0);
    fleet.tell(2);
    fleet.wait(700);
    // The second was not heard of since it asked.
    (fleet.all[0].report.held, fleet.all[0].report.busy, fleet.all[0].report.need) = (0, 0, 0);
    fleet.tell(0);
    assert_eq!(fleet.wakes, Wakes::Holders(vec![HolderId(3)]));
}

#[test]
fn slots_that_nobody_needs_are_where_they_were_used() {
    let mut fleet = Fleet::of(2, &ceiling(10));
    fleet.all[0].report.headroom = 4;
    fleet.all[1].report.headroom = 2;
    assert_eq!((fleet.tell(0).slots, fleet.tell(1).slots), (4, 2));
    let grant = fleet.need(1, 9);
    assert_eq!((grant.slots, grant.target), (6, 9), "until somebody needs them");
    assert!(fleet.tell(0).contended);
}

#[test]
fn a_crowd_is_looked_at_now_and_then_and_nobody_is_forgotten() {
    let mut fleet = Fleet::of(150, &ceiling(100));
    for round in 0..40_u64 {
        for i in 0..150 {
            let hungry = (i as u64 + round / 10).is_multiple_of(3);
            fleet.all[i].report.need = if hungry { 2 } else { 0 };
            fleet.all[i].report.held = fleet.all[i].report.held.min(fleet.all[i].report.need);
            fleet.fill(i);
            fleet.tell(i);
            fleet.wait(6);
            assert!(fleet.charges() <= 100);
        }
        if round % 10 > 2 {
            let has: Vec<u32> = fleet.all.iter().map(|process| process.report.held).collect();
            assert_eq!(has.iter().sum::<u32>(), 100, "round {round}: {has:?}");
        }
    }
}

// ------------------------------------------------------------------ the ceiling

/// A fleet in which all slots are in use: `n` processes that need `need` each.
fn busy(n: u128, need: u32, limits: &Limits) -> Fleet {
    let mut fleet = Fleet::of(n, limits);
    for i in 0..fleet.all.len() {
        fleet.need(i, need);
        fleet.fill(i);
    }
    for i in 0..fleet.all.len() {
        fleet.tell(i);
        fleet.fill(i);
    }
    fleet
}

fn refused(generation: u64, calls: u32) -> News {
    News::Throttled { generation, calls, wait: 1000 }
}

fn limit(fleet: &Fleet) -> u32 {
    fleet.ledger.book.as_ref().expect("a book").control.full()
}

#[test]
fn an_unknown_ceiling_grows_by_good_replies_while_it_is_what_holds_back() {
    let mut fleet = busy(2, 20, &Limits::default());
    assert_eq!(fleet.tell(0).ceiling, 10);
    fleet.all[0].report.served = 4;
    assert_eq!(fleet.tell(0).ceiling, 22);
    fleet.all[0].report.served = 9;
    assert_eq!(fleet.tell(0).ceiling, 49);
    fleet.all[0].report.served = 9;
    assert_eq!(fleet.tell(0).ceiling, 49, "forty are needed");
}

/// resilience4j/resilience4j#1177: ten refusals of one event made a hundredth of the limit.
#[test]
fn resilience4j_1177_a_hundred_refusals_are_one_cut() {
    let mut fleet = busy(10, 20, &ceiling(200));
    let generation = fleet.tell(0).generation;
    assert_eq!(limit(&fleet), 200);
    // Of 200 in flight, each process is refused ten: the provider serves 100.
    for i in 0..10 {
        fleet.all[i].report.busy = 10;
        let grant = fleet.news(i, refused(generation, 10));
        assert_eq!(grant.generation, generation + 1, "one event");
        assert_eq!(limit(&fleet), 200 - 10 * (u32::try_from(i).expect("small") + 1));
    }
    // And the same hundred one by one.
    let mut fleet = busy(10, 20, &ceiling(200));
    for n in 0..100 {
        let i = n % 10;
        fleet.all[i].report.busy -= 1;
        assert_eq!(fleet.news(i, refused(generation, 1)).generation, generation + 1);
    }
    assert_eq!(limit(&fleet), 100);
}

#[test]
fn the_ceiling_never_falls_below_its_floor() {
    let mut fleet = busy(1, 20, &Limits { floor: 7, ..ceiling(20) });
    fleet.all[0].report.busy = 0;
    let generation = fleet.tell(0).generation;
    fleet.news(0, refused(generation, 20));
    assert_eq!(limit(&fleet), 7);
}

#[test]
fn after_a_cut_all_give_back_what_is_above() {
    let mut fleet = busy(2, 10, &ceiling(20));
    let generation = fleet.tell(0).generation;
    fleet.all[0].report.busy = 2;
    fleet.news(0, refused(generation, 8));
    let other = fleet.tell(1);
    assert!(other.contended && other.ceiling == 12, "{other:?}");
}

#[test]
fn what_is_in_doubt_comes_back_by_doubling() {
    let mut fleet = busy(2, 32, &ceiling(64));
    // So many were served for long: a refusal there says that it has fallen.
    for _ in 0..4 {
        fleet.wait(1000);
        fleet.tell(0);
        fleet.tell(1);
    }
    let generation = fleet.tell(0).generation;
    fleet.all[0].report.busy = 30;
    fleet.news(0, News::Paused { scope: None, wait: 1000, reason: PauseReason::Hint });
    fleet.news(0, refused(generation, 2));
    assert_eq!(limit(&fleet), 62);
    for process in &mut fleet.all {
        (process.report.busy, process.report.held) = (0, 0);
    }
    fleet.tell(0);
    fleet.tell(1);
    fleet.wait(1000);
    let mut seen = Vec::new();
    for _ in 0..8 {
        for process in &mut fleet.all {
            process.report.held = 0;
        }
        seen.push(fleet.tell(0).ceiling);
        fleet.wait(1000);
    }
    assert_eq!(seen, [1, 2, 4, 8, 16, 32, 62, 62]);
}

#[test]
fn who_lacks_slots_in_a_ramp_is_told_when_to_ask() {
    let mut fleet = Fleet::of(2, &ceiling(60));
    fleet.news(0, News::Paused { scope: None, wait: 1000, reason: PauseReason::Hint });
    fleet.wait(1000);
    let grant = fleet.need(0, 60);
    assert_eq!((grant.slots, grant.ceiling, grant.again), (10, 10, Some(20)), "a slot more each 12 ms");
    let other = fleet.need(1, 60);
    assert_eq!((other.slots, other.again), (0, Some(24)), "and the other one is first");
    fleet.wait(600);
    assert_eq!((fleet.tell(1).slots, fleet.tell(1).again), (30, None));
}

#[test]
fn it_looks_above_the_limit_rarely_and_doubles_what_holds() {
    let mut fleet = busy(1, 100, &Limits { start: 10, ..Limits::default() });
    let generation = fleet.tell(0).generation;
    fleet.all[0].report.busy = 8;
    let grant = fleet.news(0, refused(generation, 2));
    assert_eq!(limit(&fleet), 8);
    let keep = |fleet: &mut Fleet, ms: u64| {
        for _ in 0..ms / 1000 {
            fleet.wait(1000);
            fleet.all[0].report.served = 5;
            fleet.tell(0);
            fleet.fill(0);
        }
    };
    keep(&mut fleet, 19_000);
    assert_eq!(fleet.tell(0).ceiling, 8);
    keep(&mut fleet, 1000);
    assert_eq!(fleet.tell(0).ceiling, 9, "20 times what the refusal cost");
    fleet.fill(0);
    // It holds: by one, by two, by four.
    let mut seen = Vec::new();
    for _ in 0..10 {
        keep(&mut fleet, 1000);
        seen.push(limit(&fleet));
    }
    seen.dedup();
    assert!(seen.windows(2).all(|w| w[1] > w[0]) && seen.contains(&9) && seen.contains(&11), "{seen:?}");
    let before = limit(&fleet);
    // Refused above: the limit is as it was, and the next look is twice as far away.
    assert!(fleet.all[0].report.held > before, "{} of {before}", fleet.all[0].report.held);
    fleet.all[0].report.busy = before;
    let generation = grant.generation.max(fleet.tell(0).generation);
    fleet.news(0, refused(generation, 1));
    assert_eq!(limit(&fleet), before);
    fleet.all[0].report.held = before;
    keep(&mut fleet, 39_000);
    assert_eq!(fleet.tell(0).ceiling, before);
    keep(&mut fleet, 2000);
    assert_eq!(fleet.tell(0).ceiling, before + 1);
}

#[test]
fn a_configured_ceiling_is_never_exceeded() {
    let mut fleet = busy(2, 50, &ceiling(20));
    for _ in 0..600 {
        fleet.wait(1000);
        for i in 0..2 {
            fleet.all[i].report.served = 10;
            assert!(fleet.tell(i).ceiling <= 20);
            fleet.fill(i);
        }
    }
    assert_eq!(fleet.charges(), 20);
}

#[test]
fn overload_is_one_cut_by_a_quarter() {
    let mut fleet = busy(2, 10, &ceiling(20));
    let generation = fleet.tell(0).generation;
    let overloaded = News::Overloaded { generation, wait: 0 };
    assert_eq!(fleet.news(0, overloaded.clone()).ceiling, 15);
    assert_eq!(fleet.news(1, overloaded).ceiling, 15, "of the same generation");
    assert_eq!(limit(&fleet), 20);
    fleet.wait(500);
    assert_eq!(fleet.tell(0).ceiling, 20);
}

#[test]
fn the_highest_generation_of_limits_counts_and_of_that_the_lowest() {
    let mut fleet = Fleet::of(3, &ceiling(10));
    fleet.all[0].report.limits = Limits { generation: 1, ..ceiling(30) };
    let grant = fleet.tell(0);
    assert_eq!((grant.ceiling, grant.disagree), (30, false));
    fleet.all[1].report.limits = Limits { generation: 1, ..ceiling(20) };
    let grant = fleet.tell(1);
    assert_eq!((grant.ceiling, grant.disagree), (20, true));
    fleet.all[0].report.limits.ceiling = Some(20);
    let grant = fleet.tell(0);
    assert_eq!((grant.ceiling, grant.disagree), (20, false));
    fleet.all[2].report.limits.ceiling = None;
    assert_eq!(fleet.tell(2).ceiling, 20, "an older generation is not asked");
}

// ------------------------------------------------------------------ scopes

fn pause(wait: u64) -> News {
    News::Paused { scope: None, wait, reason: PauseReason::Hint }
}

fn opened(wait: u64) -> News {
    News::Opened { scope: None, wait, first: 5000, last: 30_000 }
}

fn probe() -> News {
    News::Probe { scope: None, timeout: 2000 }
}

#[test]
fn pauses_are_merged_by_maximum_and_cleared_by_name() {
    let mut fleet = Fleet::of(2, &ceiling(4));
    let first = root(&fleet.news(0, pause(30_000))).generation;
    assert_eq!(root(&fleet.news(1, pause(10_000))).pause.expect("paused").wait, 30_000);
    assert_eq!(fleet.wakes, Wakes::Holders(vec![]), "nothing new");
    let grant = fleet.news(1, pause(u64::MAX));
    assert_eq!(root(&grant).pause.expect("paused").wait, 24 * 3_600_000);
    assert_eq!(fleet.wakes, Wakes::All);
    let cleared = |generation| News::Cleared { scope: None, generation };
    assert!(root(&fleet.news(0, cleared(first))).pause.is_some(), "another one");
    let grant = fleet.news(0, cleared(root(&grant).generation));
    assert!(root(&grant).pause.is_none());
    assert_eq!(fleet.wakes, Wakes::All);
    fleet.renew(59_000);
    assert_eq!(fleet.tell(1).scopes.len(), 1, "all have time to learn of it");
    fleet.renew(2000);
    assert_eq!(fleet.tell(1).scopes.len(), 0);
}

#[test]
fn one_probe_over_the_fleet_and_none_of_a_short_pause() {
    let mut fleet = Fleet::of(3, &ceiling(4));
    fleet.news(0, pause(300_000));
    fleet.renew(299_000);
    assert!(root(&fleet.news(0, probe())).leave.is_none(), "five minutes are waited for");
    fleet.renew(2000);
    fleet.news(0, pause(200 * 60_000));
    fleet.renew(10 * 60_000 - 1000);
    assert!(root(&fleet.news(0, probe())).leave.is_none(), "a twentieth of it");
    fleet.renew(1000);
    let leave = root(&fleet.news(1, probe())).leave.expect("the first who asks");
    assert_eq!(leave.within, 2000);
    assert!(root(&fleet.news(2, probe())).leave.is_none());
    // It was not told: it asks again.
    fleet.wait(500);
    assert_eq!(root(&fleet.news(1, probe())).leave.expect("its own").within, 1500);
    assert!(root(&fleet.tell(1)).leave.is_none(), "only to who asks");
    fleet.renew(3000);
    assert!(root(&fleet.news(2, probe())).leave.is_none(), "it is lost, and the next one has its time");
    fleet.renew(10 * 60_000);
    assert!(root(&fleet.news(2, probe())).leave.is_some());
}

#[test]
fn a_probe_takes_a_slot_as_every_call_does() {
    let mut fleet = Fleet::of(2, &ceiling(1));
    fleet.need(1, 1);
    fleet.fill(1);
    fleet.news(0, opened(60_000));
    fleet.renew(5000);
    assert!(root(&fleet.news(0, probe())).leave.is_none(), "the only one is in use");
    (fleet.all[1].report.busy, fleet.all[1].report.held) = (0, 0);
    fleet.tell(1);
    let grant = fleet.news(0, probe());
    assert!(root(&grant).leave.is_some() && grant.slots == 1);
}

#[test]
fn one_alert_an_incident() {
    let mut fleet = Fleet::of(2, &ceiling(4));
    let grant = fleet.news(0, opened(60_000));
    let known = grant.clone();
    assert!(root(&grant).open.expect("open").yours);
    assert!(!root(&fleet.news(1, opened(60_000))).open.expect("open").yours, "it was open already");
    // Its answer was lost: it is told again, until it is known to know.
    fleet.all[0].grant = Some(Grant { version: known.version - 1, ..known.clone() });
    assert!(root(&fleet.tell(0)).open.expect("open").yours);
    assert!(!root(&fleet.tell(0)).open.expect("open").yours);
    fleet.renew(20_000);
    let generation = root(&fleet.tell(0)).generation;
    let closed = News::Closed { scope: None, generation };
    assert!(root(&fleet.news(1, closed)).open.is_none());
    assert_eq!(fleet.wakes, Wakes::All);
    // Before the ramp can be over: the same incident.
    fleet.renew(10_000);
    assert!(!root(&fleet.news(1, opened(60_000))).open.expect("open").yours);
    let generation = root(&fleet.tell(0)).generation;
    fleet.news(1, News::Closed { scope: None, generation });
    fleet.renew(60_000);
    assert!(root(&fleet.news(1, opened(60_000))).open.expect("open").yours);
}

#[test]
fn probes_of_a_breaker_grow_apart() {
    let mut fleet = Fleet::of(1, &ceiling(4));
    fleet.news(0, opened(60_000));
    let mut gaps = Vec::new();
    for _ in 0..5 {
        let mut waited = 0;
        while root(&fleet.news(0, probe())).leave.is_none() {
            fleet.wait(1000);
            waited += 1000;
        }
        gaps.push(waited);
        fleet.news(0, News::Probed { scope: None, failed: true });
    }
    assert_eq!(gaps, [5000, 10_000, 15_000, 15_000, 15_000], "the members add as much again");
    fleet.wait(15_000);
    assert!(root(&fleet.news(0, probe())).leave.is_some());
    fleet.news(0, News::Probed { scope: None, failed: false });
    fleet.wait(4000);
    assert!(root(&fleet.news(0, probe())).leave.is_none());
    fleet.wait(1000);
    assert!(root(&fleet.news(0, probe())).leave.is_some(), "nothing was learned: as the first");
}

#[test]
fn a_scope_is_probed_only_if_the_provider_is_open() {
    let mut fleet = Fleet::of(1, &ceiling(4));
    let scope = || Some("model".to_owned());
    fleet.news(0, News::Opened { scope: scope(), wait: 60_000, first: 1000, last: 30_000 });
    fleet.news(0, pause(20_000));
    fleet.renew(10_000);
    let ask = News::Probe { scope: scope(), timeout: 1000 };
    let leave = |grant: &Grant| grant.scopes.iter().any(|scope| scope.leave.is_some());
    assert!(!leave(&fleet.news(0, ask.clone())));
    fleet.renew(10_000);
    assert!(leave(&fleet.news(0, ask)));
}

#[test]
fn the_ramp_is_counted_together() {
    let mut fleet = Fleet::of(2, &ceiling(4));
    let ramped = News::Ramped { scope: None, calls: 10, throttled: 1 };
    assert_eq!(fleet.news(0, ramped.clone()).scopes.len(), 0, "no ramp");
    fleet.news(0, opened(60_000));
    let generation = root(&fleet.tell(0)).generation;
    fleet.renew(300_000);
    fleet.news(0, News::Closed { scope: None, generation });
    fleet.news(0, ramped.clone());
    let grant = fleet.news(1, ramped);
    assert_eq!((root(&grant).calls, root(&grant).throttled), (20, 2));
    fleet.renew(200_000);
    assert_eq!(root(&fleet.tell(0)).calls, 20, "for as long as it can last");
}

#[test]
fn so_many_scopes_are_shared_and_no_more() {
    let mut fleet = Fleet::of(1, &ceiling(4));
    let one = |n: u32| News::Paused { scope: Some(n.to_string()), wait: 1000, reason: PauseReason::Bare };
    for n in 0..70 {
        fleet.news(0, one(n));
    }
    assert_eq!(fleet.tell(0).scopes.len(), 64);
    assert_eq!(fleet.news(0, pause(1000)).scopes.len(), 65, "the provider's own always");
    fleet.renew(62_000);
    let grant = fleet.news(0, one(69));
    assert_eq!(grant.scopes.len(), 1, "what is over makes room");
}

// ------------------------------------------------------------------ rates

fn rate(per_minute: u64, burst: u64) -> Limits {
    Limits { requests: Some(RateLimit { per_minute, burst }), ..ceiling(10) }
}

impl Fleet {
    fn wants(&mut self, i: usize, want: u64, least: u64) -> Chunk {
        self.all[i].report.rates =
            vec![RateReport { of: Quantity::Requests, want, least, chunk: 0, rest: 0 }];
        self.tell(i).rates[0]
    }
}

#[test]
fn a_bucket_begins_empty_and_is_shared_by_want() {
    let mut fleet = Fleet::of(2, &rate(6000, 100));
    assert_eq!(fleet.wants(0, 50, 1).amount, 0);
    assert_eq!(fleet.all[0].grant.as_ref().expect("a grant").again, Some(20));
    fleet.wants(1, 50, 1);
    fleet.wait(400);
    let chunk = fleet.wants(0, 50, 1);
    assert_eq!((chunk.amount, chunk.valid, chunk.per_minute, chunk.burst), (20, 2000, 6000, 100));
    assert_eq!(fleet.wants(1, 50, 1).amount, 10, "what is left, by what is not served yet");
    fleet.wait(600_000);
    fleet.wants(1, 0, 0);
    assert_eq!(fleet.wants(0, 500, 1).amount, 100, "the burst at most");
}

#[test]
fn less_than_the_first_of_the_queue_costs_is_of_no_use() {
    let mut fleet = Fleet::of(2, &rate(6000, 100));
    fleet.wants(1, 100, 1);
    fleet.wait(300);
    assert_eq!(fleet.wants(0, 60, 40).amount, 0);
    assert_eq!(fleet.all[0].grant.as_ref().expect("a grant").again, Some(100));
    fleet.wait(100);
    assert_eq!(fleet.wants(0, 60, 40).amount, 40, "more than its half");
}

#[test]
fn the_rest_is_given_back_once_and_in_time() {
    let mut fleet = Fleet::of(1, &rate(60, 50));
    fleet.wait(50_000);
    let back = |fleet: &mut Fleet, chunk, rest| {
        fleet.all[0].report.rates =
            vec![RateReport { of: Quantity::Requests, want: 0, least: 0, chunk, rest }];
        fleet.tell(0);
        let book = fleet.ledger.book.as_ref().expect("a book");
        book.rates[0].as_ref().expect("a bucket").level / 60_000
    };
    let first = fleet.wants(0, 40, 1);
    assert_eq!(first.amount, 40);
    assert_eq!(back(&mut fleet, first.chunk + 1, 10), 10, "of another chunk");
    assert_eq!(back(&mut fleet, first.chunk, 30), 40);
    assert_eq!(back(&mut fleet, first.chunk, 30), 40, "once");
    let second = fleet.wants(0, 40, 1);
    fleet.wait(2000);
    assert_eq!(back(&mut fleet, second.chunk, 40), 2, "too late");
    let third = fleet.wants(0, 2, 1);
    assert_eq!(back(&mut fleet, third.chunk, u64::MAX), 2, "no more than it was");
}

#[test]
fn a_reply_lowers_the_bucket_and_never_raises_it() {
    let mut fleet = Fleet::of(2, &rate(60, 50));
    fleet.wait(40_000);
    fleet.wants(1, 10, 1);
    fleet.all[1].report.rates.clear();
    let level = |fleet: &Fleet| {
        let book = fleet.ledger.book.as_ref().expect("a book");
        book.rates[0].as_ref().expect("a bucket").level / 60_000
    };
    let left = |left| News::Quota { of: Quantity::Requests, left };
    fleet.news(0, left(1000));
    assert_eq!(level(&fleet), 30);
    fleet.news(0, left(25));
    assert_eq!(level(&fleet), 15, "ten of which the other one may not have used");
    fleet.wait(4000);
    fleet.news(0, left(12));
    assert_eq!(level(&fleet), 12);
}

#[test]
fn a_late_report_takes_nothing_out() {
    let mut fleet = Fleet::of(1, &rate(60, 50));
    fleet.wait(40_000);
    fleet.wants(0, 10, 1);
    let (grant, _) = fleet.ledger.exchange(fleet.now, "", &fleet.all[0].report);
    assert!(grant.stale && grant.rates[0].amount == 0, "{grant:?}");
}

// ------------------------------------------------------------------ properties

fn any_u64() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0_u64..50, 2 => 0_u64..100_000, 1 => Just(u64::MAX), 1 => any::<u64>()]
}

fn any_u32() -> impl Strategy<Value = u32> {
    prop_oneof![4 => 0_u32..30, 1 => Just(u32::MAX), 1 => any::<u32>()]
}

fn any_news() -> impl Strategy<Value = News> {
    let scope = || prop_oneof![Just(None), Just(Some(String::new())), Just(Some("a".to_owned()))];
    let of = prop_oneof![Just(Quantity::Requests), Just(Quantity::Tokens)];
    prop_oneof![
        (any_u64(), any_u32(), any_u64()).prop_map(|(generation, calls, wait)| News::Throttled {
            generation,
            calls,
            wait
        }),
        (any_u64(), any_u64()).prop_map(|(generation, wait)| News::Overloaded { generation, wait }),
        (scope(), any_u64()).prop_map(|(scope, wait)| News::Paused {
            scope,
            wait,
            reason: PauseReason::Bare
        }),
        (scope(), any_u64()).prop_map(|(scope, generation)| News::Cleared { scope, generation }),
        (scope(), any_u64(), any_u64(), any_u64()).prop_map(|(scope, wait, first, last)| News::Opened {
            scope,
            wait,
            first,
            last
        }),
        (scope(), any_u64()).prop_map(|(scope, timeout)| News::Probe { scope, timeout }),
        (scope(), any::<bool>()).prop_map(|(scope, failed)| News::Probed { scope, failed }),
        (scope(), any_u64()).prop_map(|(scope, generation)| News::Closed { scope, generation }),
        (scope(), any_u64(), any_u64()).prop_map(|(scope, calls, throttled)| News::Ramped {
            scope,
            calls,
            throttled
        }),
        (of, any_u64()).prop_map(|(of, left)| News::Quota { of, left }),
    ]
}

fn any_rate_limit() -> impl Strategy<Value = Option<RateLimit>> {
    proptest::option::of(
        (any_u64(), any_u64()).prop_map(|(per_minute, burst)| RateLimit { per_minute, burst }),
    )
}

fn any_limits() -> impl Strategy<Value = Limits> {
    (0_u64..3, any_u32(), any_u32(), proptest::option::of(any_u32()), any_rate_limit(), any_rate_limit())
        .prop_map(|(generation, floor, start, ceiling, requests, tokens)| Limits {
            generation,
            floor,
            start,
            ceiling,
            requests,
            tokens,
        })
}

/// Of anybody, with anything in it.
fn any_report() -> impl Strategy<Value = Report> {
    let terms = (any_u64(), any_u64(), any_u64(), any::<f64>(), any_u64(), any_u32())
        .prop_map(|(ttl, gap, extra, keep, grace, trickle)| Terms { ttl, gap, extra, keep, grace, trickle });
    let terms = prop_oneof![3 => Just(Terms::default()), 1 => terms];
    let rates = proptest::collection::vec(
        (any_u64(), any_u64(), any_u64(), any_u64()).prop_map(|(want, least, chunk, rest)| RateReport {
            of: if want % 2 == 0 { Quantity::Requests } else { Quantity::Tokens },
            want,
            least,
            chunk,
            rest,
        }),
        0..3,
    );
    let slots = (any_u32(), any_u32(), any_u32(), any_u32(), any_u32(), any_u32());
    let version = (proptest::option::of((0_u64..4).prop_map(Epoch)), 0_u64..20, 0_u64..4);
    (
        (0_u128..5).prop_map(HolderId),
        any_u64(),
        version,
        slots,
        terms,
        any_limits(),
        proptest::collection::vec(any_news(), 0..3),
        rates,
        proptest::bool::weighted(0.1),
    )
        .prop_map(|(holder, seq, version, slots, terms, limits, news, rates, bye)| {
            let (epoch, version, offer) = version;
            let (held, busy, need, headroom, weight, served) = slots;
            Report {
                seq,
                epoch,
                version,
                held,
                busy,
                need,
                headroom,
                weight,
                terms,
                limits,
                served,
                news,
                rates,
                bye,
                ..Report::new(holder, Epoch(offer))
            }
        })
}

proptest! {
    /// Whatever comes in: nothing breaks, and nobody is given what is not there.
    #[test]
    fn nobody_is_given_what_is_not_there(
        learns: bool,
        reports in proptest::collection::vec((any_report(), prop_oneof![0_u64..3000, any_u64()], 0_u8..20), 1..60),
    ) {
        let mut ledger = Ledger::new(learns);
        let mut clock = 1_700_000_000_000_u64;
        for (report, passed, run) in reports {
            clock = (clock + passed % (1 << 40)) % (1 << 45);
            let before = ledger.clone();
            let (grant, _) = ledger.exchange(clock, if run == 0 { "b" } else { "a" }, &report);
            let book = ledger.book.as_ref().expect("a book");
            let sum: u64 = book.records.values().map(|record| record.charge).sum();
            let old = before.book.as_ref().and_then(|book| book.records.get(&report.holder));
            let claim = u64::from(report.busy.max(report.held)).max(old.map_or(0, |old| old.charge));
            let charge = book.records[&report.holder].charge;
            if charge > claim {
                // More than it had or said: that was given, out of what is free.
                prop_assert!(sum <= u64::from(book.control.full().max(grant.ceiling)), "{sum} of {}", grant.ceiling);
                prop_assert!(!grant.stale);
            }
            if grant.stale {
                prop_assert_eq!(old.map(|old| (old.seq, old.version)), book.records.get(&report.holder).map(|own| (own.seq, own.version)));
            }
            // (Who leaves is no member any more, whatever it was configured with.)
            if let Some(most) = report.limits.ceiling.filter(|_| book.records.len() == 1 && !report.bye) {
                prop_assert!(grant.ceiling <= most.max(old.map_or(0, |_| u32::MAX)));
            }
            prop_assert!(grant.safe <= grant.slots);
            let open = grant.scopes.iter().filter(|scope| scope.leave.is_some()).count();
            prop_assert!(open <= report.news.len());
        }
    }

    /// Over any time, what is handed out is bounded by the rate and the burst.
    #[test]
    fn a_rate_holds_in_any_window(
        per_minute in 1_u64..10_000,
        burst in 1_u64..200,
        wants in proptest::collection::vec((0_usize..4, 0_u64..300, 0_u64..300, 0_u64..3000), 1..200),
    ) {
        let mut fleet = Fleet::of(4, &rate(per_minute, burst));
        let mut handed = Vec::new();
        for (i, want, least, passed) in wants {
            fleet.wait(passed);
            let chunk = fleet.wants(i, want, least.min(want));
            prop_assert!(chunk.amount <= want);
            prop_assert!(chunk.amount == 0 || chunk.amount >= least.min(want), "no part that pays for nothing");
            handed.push((fleet.now, chunk.amount));
        }
        for (i, &(from, _)) in handed.iter().enumerate() {
            let mut sum = 0;
            for &(to, amount) in &handed[i..] {
                sum += amount;
                prop_assert!(sum * 60_000 <= per_minute * (to - from) + burst * 60_000);
            }
        }
    }
}
