use super::{Ledger, Wakes};
use crate::PauseReason;
use crate::store::{Epoch, Grant, HolderId, Limits, News, Report, ScopeGrant, Terms};

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
