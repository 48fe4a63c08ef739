//! The test of a store of retry tokens: does it do what [`RetryTokens`] asks of it?
//!
//! For stores of your own, and for those of this project: run [`check`] and [`race`] against the real thing, under the
//! real clock; a store in memory may run under a paused one. Keys begin with a prefix, so that runs can share a
//! database; take another one for each run. What is left behind when all is well are open tokens, for
//! the sweeper.
//!
//! | check | what it does | what must hold |
//! |---|---|---|
//! | [`race`] | 100 callers want one key, for 5 s, with a wait of 250 ms | one grant in each wait, and no two nearer than 98 % of it |
//! | [`fresh_keys`] | 20 callers want each of 100 keys that nobody has seen | one grant each; the others are told a wait |
//! | [`growth`] | claims after each wait | streaks 1, 2, 3; waits in the range of the schedule; refusals change neither |
//! | [`fencing`] | an older holder extends and clears | nothing happens |
//! | [`extending`] | extends by less, by more, and once it is open | never shortened; closed for as long as was asked |
//! | [`clearing`] | clears by its holder, twice | the key starts from 1 again |
//! | [`sweeping`] | sweeps live and open tokens | live ones stay; open ones go, as many as were asked at most |
//! | [`dropping`] | drops claims half-way | the key is granted again once it is open |
//!
//! ```
//! use tower_herd::retry_token::LocalTokens;
//! use tower_herd_sim::tokens::{Race, check, race};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap()
//! # .block_on(async {
//! let store = LocalTokens::new();
//! check(&store, "check").await.assert_kept();
//! race(&store, "race", Race::default()).await.assert_kept();
//! # });
//! ```

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};
use tokio::{
    sync::Barrier,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_herd::retry_token::{Claim, Grant, HolderId, RetryTokens, Schedule, Wait};

/// What a store did wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Report {
    /// One line each.
    pub findings: Vec<String>,
}

impl Report {
    /// Whether nothing was found.
    pub fn kept(&self) -> bool {
        self.findings.is_empty()
    }

    /// Checks that nothing was found.
    ///
    /// # Panics
    /// With all findings, if there are any.
    #[track_caller]
    pub fn assert_kept(&self) {
        assert!(self.kept(), "{self}");
    }

    fn found(&mut self, what: impl Into<String>) {
        // The first ones tell enough.
        if self.findings.len() < 20 {
            self.findings.push(what.into());
        }
    }

    fn expect(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.found(what());
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the contract of a token store")?;
        if self.kept() {
            return f.write_str(" is kept");
        }
        f.write_str(" is broken:")?;
        self.findings.iter().try_for_each(|finding| write!(f, "\n{finding}"))
    }
}

/// A schedule without growth and jitter; a window that none can have is the nearest one.
fn flat(window: Duration) -> Schedule {
    let window = window.clamp(Schedule::LEAST, Schedule::MOST);
    let flat = Schedule::new().growth(window, 1.0, window).and_then(|schedule| schedule.jitter(0.0));
    flat.unwrap_or_default()
}

/// Claims, and reports an error or a wait of none.
async fn claim<S: RetryTokens>(
    store: &S,
    key: &str,
    schedule: &Schedule,
    report: &mut Report,
) -> Option<Claim> {
    match store.claim(key, schedule).await {
        Ok(claim) => {
            if let Claim::NotBefore(Wait { wait, .. }) = claim {
                report.expect(!wait.is_zero(), || format!("{key}: refused, and told to wait for nothing"));
            }
            Some(claim)
        }
        Err(error) => {
            report.found(format!("{key}: claim failed: {error}"));
            None
        }
    }
}

/// Claims what is expected to be open.
async fn granted<S: RetryTokens>(
    store: &S,
    key: &str,
    schedule: &Schedule,
    report: &mut Report,
) -> Option<Grant> {
    match claim(store, key, schedule, report).await? {
        Claim::Granted(grant) => Some(grant),
        Claim::NotBefore(wait) => {
            report.found(format!("{key}: is open, and was refused: {wait:?}"));
            None
        }
    }
}

/// Claims what is expected to be closed.
async fn refused<S: RetryTokens>(
    store: &S,
    key: &str,
    schedule: &Schedule,
    report: &mut Report,
) -> Option<Wait> {
    match claim(store, key, schedule, report).await? {
        Claim::NotBefore(wait) => Some(wait),
        Claim::Granted(grant) => {
            report.found(format!("{key}: is closed, and was granted: {grant:?}"));
            None
        }
    }
}

/// All checks but the [`race`]. Takes about four seconds.
pub async fn check<S: RetryTokens>(store: &S, prefix: &str) -> Report {
    let mut report = fresh_keys(store, prefix, 100, 20).await;
    report.findings.extend(growth(store, prefix).await.findings);
    report.findings.extend(fencing(store, prefix).await.findings);
    report.findings.extend(extending(store, prefix).await.findings);
    report.findings.extend(clearing(store, prefix).await.findings);
    report.findings.extend(dropping(store, prefix).await.findings);
    report.findings.extend(sweeping(store, prefix).await.findings);
    report
}

/// How many want one key, for how long.
#[derive(Clone, Copy, Debug)]
pub struct Race {
    /// Callers, each of which asks again a millisecond after it was refused.
    pub callers: usize,
    /// The wait of the key.
    pub window: Duration,
    /// How long they ask.
    pub length: Duration,
}

impl Default for Race {
    /// 100 callers, 250 ms, 5 s.
    fn default() -> Self {
        Race { callers: 100, window: Duration::from_millis(250), length: Duration::from_secs(5) }
    }
}

/// What came of a [`race`].
#[derive(Clone, Debug)]
#[must_use]
pub struct Raced {
    /// What was wrong in any case.
    pub report: Report,
    /// Claims in all.
    pub claims: u64,
    /// Grants.
    pub grants: usize,
    /// Grants that were possible: one at once, and one for each wait that ended within the length.
    pub possible: usize,
    /// The shortest time between two grants: from before the one was asked for until after the other was
    /// known, so a slow reply is not taken for an early grant.
    pub min_gap: Duration,
}

impl Raced {
    /// Checks that no grant was early. What a slow machine cannot spoil.
    ///
    /// # Panics
    /// With what was found.
    #[track_caller]
    pub fn assert_kept(&self) {
        self.report.assert_kept();
    }

    /// Checks besides that each possible grant was made.
    ///
    /// # Panics
    /// With what was found.
    #[track_caller]
    pub fn assert_exact(&self) {
        self.report.assert_kept();
        assert_eq!(self.grants, self.possible, "grants of those possible ({} claims)", self.claims);
    }
}

/// So many callers want one key; each grant is one that fails, so its wait holds.
pub async fn race<S: RetryTokens>(store: &S, prefix: &str, race: Race) -> Raced {
    let Race { callers, window, length } = race;
    let schedule = flat(window);
    let key: Arc<str> = format!("{prefix}:race").into();
    let barrier = Arc::new(Barrier::new(callers));
    let mut tasks = JoinSet::new();
    for _ in 0..callers {
        let (store, key, barrier) = (store.clone(), key.clone(), barrier.clone());
        tasks.spawn(async move {
            let (mut report, mut grants, mut claims) = (Report::default(), Vec::new(), 0_u64);
            barrier.wait().await;
            // Half a wait more: the last grant is due at the very end.
            let end = Instant::now() + length + window / 2;
            while Instant::now() < end {
                let before = Instant::now();
                claims += 1;
                match claim(&store, &key, &schedule, &mut report).await {
                    Some(Claim::Granted(grant)) => grants.push((before, Instant::now(), grant.holder)),
                    Some(Claim::NotBefore(wait)) if wait.wait > window => {
                        report.found(format!("{key}: told to wait for {:?}, longer than ever", wait.wait));
                    }
                    _ => {}
                }
                sleep(Duration::from_millis(1)).await;
            }
            (report, grants, claims)
        });
    }
    let (mut report, mut grants, mut claims) =
        (Report::default(), Vec::<(Instant, Instant, HolderId)>::new(), 0);
    while let Some(done) = tasks.join_next().await {
        let (found, some, asked) = match done {
            Ok(done) => done,
            Err(error) => {
                report.found(format!("a caller ended with: {error}"));
                continue;
            }
        };
        found.findings.into_iter().for_each(|finding| report.found(finding));
        grants.extend(some);
        claims += asked;
    }
    grants.sort_by_key(|(before, ..)| *before);
    let gap = |pair: &[(Instant, Instant, HolderId)]| pair[1].1.saturating_duration_since(pair[0].0);
    let min_gap = grants.windows(2).map(gap).min().unwrap_or(window);
    let mut holders: Vec<u64> = grants.iter().map(|(.., holder)| holder.get()).collect();
    holders.sort_unstable();
    holders.dedup();
    let most = |time: Duration| (time.as_nanos() / window.as_nanos().max(1)) as usize + 1;
    let span = match (grants.first(), grants.iter().map(|(_, after, _)| *after).max()) {
        (Some((first, ..)), Some(last)) => last.saturating_duration_since(*first),
        _ => Duration::ZERO,
    };
    let (grants, possible) = (grants.len(), most(length));
    report.expect(grants > 0, || "nobody was granted anything".into());
    report.expect(holders.len() == grants, || format!("{grants} grants, {} holders", holders.len()));
    // The clocks of two machines may run 2 % apart; these are one machine's, or the store's own.
    report.expect(min_gap.saturating_mul(50) >= window.saturating_mul(49), || {
        format!("two grants within {min_gap:?}, of a wait of {window:?}")
    });
    report.expect(grants <= most(span), || {
        format!("{grants} grants in {span:?}, of a wait of {window:?}: at most {}", most(span))
    });
    Raced { report, claims, grants, possible, min_gap }
}

/// So many callers want each of so many keys that nobody has seen.
pub async fn fresh_keys<S: RetryTokens>(store: &S, prefix: &str, keys: usize, callers: usize) -> Report {
    let mut report = Report::default();
    let schedule = flat(Duration::from_secs(60));
    for n in 0..keys {
        let key: Arc<str> = format!("{prefix}:fresh:{n}").into();
        let barrier = Arc::new(Barrier::new(callers));
        let mut tasks = JoinSet::new();
        for _ in 0..callers {
            let (store, key, barrier) = (store.clone(), key.clone(), barrier.clone());
            tasks.spawn(async move {
                let mut report = Report::default();
                barrier.wait().await;
                (claim(&store, &key, &schedule, &mut report).await, report)
            });
        }
        let mut holders = Vec::new();
        while let Some(done) = tasks.join_next().await {
            let (claim, found) = match done {
                Ok(done) => done,
                Err(error) => {
                    report.found(format!("{key}: a caller ended with: {error}"));
                    continue;
                }
            };
            found.findings.into_iter().for_each(|finding| report.found(finding));
            if let Some(Claim::Granted(grant)) = claim {
                report.expect(grant.streak == 1, || format!("{key}: its first streak is {}", grant.streak));
                holders.push(grant.holder);
            }
        }
        report.expect(holders.len() == 1, || format!("{key}: {} grants of a fresh key", holders.len()));
        for holder in holders {
            report.expect(store.clear(&key, holder).await.is_ok(), || format!("{key}: clear failed"));
        }
    }
    report
}

/// Claims after each wait, and in it.
pub async fn growth<S: RetryTokens>(store: &S, prefix: &str) -> Report {
    let mut report = Report::default();
    let key = format!("{prefix}:growth");
    let (base, cap) = (Duration::from_millis(200), Duration::from_millis(500));
    let schedule = Schedule::new().growth(base, 2.0, cap).unwrap_or_default();
    for streak in 1..=5 {
        let asked = Instant::now();
        let Some(grant) = granted(store, &key, &schedule, &mut report).await else { return report };
        report.expect(grant.streak == streak, || format!("streak {} and not {streak}", grant.streak));
        let (least, most) = (schedule.delay(streak, 0.0), schedule.delay(streak, 1.0));
        // Databases count in microseconds.
        let slack = Duration::from_micros(100);
        report.expect(grant.next_in + slack >= least && grant.next_in <= most + slack, || {
            format!("streak {streak}: closed for {:?}, which is not in {least:?} to {most:?}", grant.next_in)
        });
        for _ in 0..5 {
            match claim(store, &key, &schedule, &mut report).await {
                Some(Claim::NotBefore(wait)) => {
                    report.expect(wait.streak == streak, || {
                        format!("a refusal says streak {} and not {streak}", wait.streak)
                    });
                    report.expect(wait.wait <= grant.next_in, || {
                        format!("closed for {:?}, and told to wait {:?}", grant.next_in, wait.wait)
                    });
                }
                // A machine that is late asks for what is open by now: there is nothing more to learn.
                Some(Claim::Granted(_)) if asked.elapsed() < grant.next_in => {
                    report.found(format!("streak {streak}: granted before its {:?}", grant.next_in));
                }
                _ => return report,
            }
        }
        sleep(grant.next_in + Duration::from_millis(2)).await;
    }
    // Other keys know nothing of it.
    let other = format!("{prefix}:growth:other");
    if let Some(grant) = granted(store, &other, &schedule, &mut report).await {
        report.expect(grant.streak == 1, || format!("another key has streak {}", grant.streak));
    }
    report
}

/// An older holder extends and clears.
pub async fn fencing<S: RetryTokens>(store: &S, prefix: &str) -> Report {
    let mut report = Report::default();
    let key = format!("{prefix}:fencing");
    let (short, long) = (flat(Duration::from_millis(50)), flat(Duration::from_secs(60)));
    let Some(old) = granted(store, &key, &short, &mut report).await else { return report };
    sleep(Duration::from_millis(60)).await;
    let Some(new) = granted(store, &key, &long, &mut report).await else { return report };
    report.expect(old.holder != new.holder, || "two grants, one holder".into());
    report.expect(new.streak == 2, || format!("the second streak is {}", new.streak));
    let hour = Duration::from_secs(3600);
    for holder in [old.holder, HolderId::from(!new.holder.get())] {
        match (store.extend(&key, holder, hour).await, store.clear(&key, holder).await) {
            (Ok(false), Ok(false)) => {}
            answers => report.found(format!("a stale holder got through, or was told so: {answers:?}")),
        }
    }
    if let Some(wait) = refused(store, &key, &long, &mut report).await {
        report.expect(wait.wait <= new.next_in, || format!("a stale holder prolonged it to {:?}", wait.wait));
        report.expect(wait.streak == 2, || format!("a stale holder changed the streak to {}", wait.streak));
    }
    let nobody = format!("{prefix}:fencing:nobody");
    match (store.extend(&nobody, new.holder, hour).await, store.clear(&nobody, new.holder).await) {
        (Ok(false), Ok(false)) => {}
        answers => report.found(format!("a key without a token was extended or cleared: {answers:?}")),
    }
    report.expect(matches!(store.peek(&nobody).await, Ok(None)), || "extend or clear made a token".into());
    report.expect(matches!(store.clear(&key, new.holder).await, Ok(true)), || {
        "its holder did not clear it".into()
    });
    report
}

/// Extends by less, by more, and once it is open.
pub async fn extending<S: RetryTokens>(store: &S, prefix: &str) -> Report {
    let mut report = Report::default();
    let key = format!("{prefix}:extending");
    let Some(grant) = granted(store, &key, &flat(Duration::from_secs(60)), &mut report).await else {
        return report;
    };
    // Less, more, and what overflows if it is added to anything.
    for (by, least) in [(1, 50), (0, 50), (600, 590), (1, 590), (30 * 24 * 3600, 29 * 24 * 3600)] {
        let extended = store.extend(&key, grant.holder, Duration::from_secs(by)).await;
        report.expect(matches!(extended, Ok(true)), || format!("extend by {by} s: {extended:?}"));
        match store.peek(&key).await {
            Ok(Some(token)) => {
                report.expect(token.wait >= Duration::from_secs(least), || {
                    format!("extended by {by} s, and closed for {:?}", token.wait)
                });
                report.expect((token.holder, token.streak) == (grant.holder, 1), || format!("{token:?}"));
            }
            other => report.found(format!("peek: {other:?}")),
        }
    }
    report.expect(store.extend(&key, grant.holder, Duration::MAX).await.is_ok(), || {
        "the longest of all durations is an error".into()
    });
    report.expect(matches!(store.clear(&key, grant.holder).await, Ok(true)), || "clear failed".into());

    // Once it is open, and nobody came: closed again.
    let short = flat(Duration::from_millis(20));
    let Some(grant) = granted(store, &key, &short, &mut report).await else { return report };
    sleep(Duration::from_millis(30)).await;
    match store.peek(&key).await {
        Ok(Some(token)) => report.expect(token.wait.is_zero(), || format!("open, and peek says {token:?}")),
        other => report.found(format!("an open token is gone: {other:?}")),
    }
    let extended = store.extend(&key, grant.holder, Duration::from_secs(60)).await;
    report.expect(matches!(extended, Ok(true)), || format!("an open token was not extended: {extended:?}"));
    if let Some(wait) = refused(store, &key, &short, &mut report).await {
        report.expect(wait.wait > Duration::from_secs(50), || format!("closed again, for {:?}", wait.wait));
    }
    report.expect(matches!(store.clear(&key, grant.holder).await, Ok(true)), || "clear failed".into());
    report
}

/// Clears by its holder, twice.
pub async fn clearing<S: RetryTokens>(store: &S, prefix: &str) -> Report {
    let mut report = Report::default();
    let key = format!("{prefix}:clearing");
    let schedule = flat(Duration::from_secs(60));
    let Some(first) = granted(store, &key, &schedule, &mut report).await else { return report };
    refused(store, &key, &schedule, &mut report).await;
    let (once, twice) = (store.clear(&key, first.holder).await, store.clear(&key, first.holder).await);
    report.expect(matches!((&once, &twice), (Ok(true), Ok(false))), || {
        format!("cleared once: {once:?}, twice: {twice:?}")
    });
    report.expect(matches!(store.peek(&key).await, Ok(None)), || "a cleared key is known".into());
    if let Some(grant) = granted(store, &key, &schedule, &mut report).await {
        report.expect(grant.streak == 1, || format!("after a success the streak is {}", grant.streak));
        report.expect(matches!(store.clear(&key, grant.holder).await, Ok(true)), || "clear failed".into());
    }
    report
}

/// Sweeps live and open tokens. Of all keys, those of others too: not beside other users of the store.
pub async fn sweeping<S: RetryTokens>(store: &S, prefix: &str) -> Report {
    let mut report = Report::default();
    let (live, open) = (flat(Duration::from_secs(3600)), flat(Duration::from_millis(1)));
    let (live_key, open_key) = (|n| format!("{prefix}:live:{n}"), |n| format!("{prefix}:open:{n}"));
    let mut grants = Vec::new();
    for n in 0..10 {
        granted(store, &open_key(n), &open, &mut report).await;
        grants.push((live_key(n), granted(store, &live_key(n), &live, &mut report).await));
    }
    sleep(Duration::from_millis(30)).await;
    match store.sweep(Duration::from_secs(3600), u32::MAX).await {
        Ok(_) => {
            let kept = matches!(store.peek(&open_key(0)).await, Ok(Some(_)));
            report.expect(kept, || "a token that was open for 30 ms is swept after an hour".into());
        }
        Err(error) => report.found(format!("sweep failed: {error}")),
    }
    match store.sweep(Duration::from_millis(1), 3).await {
        Ok(swept) => report.expect(swept <= 3, || format!("asked to sweep 3, and swept {swept}")),
        Err(error) => report.found(format!("sweep failed: {error}")),
    }
    // Others' open tokens may be in the way, and a store that is asked for many may take its time.
    for _ in 0..100 {
        match store.sweep(Duration::from_millis(1), 1000).await {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => {
                report.found(format!("sweep failed: {error}"));
                break;
            }
        }
    }
    for n in 0..10 {
        let swept = matches!(store.peek(&open_key(n)).await, Ok(None));
        report.expect(swept, || format!("{}: was not swept", open_key(n)));
    }
    for (key, grant) in grants {
        refused(store, &key, &live, &mut report).await;
        if let Some(grant) = grant {
            let cleared = store.clear(&key, grant.holder).await;
            report.expect(matches!(cleared, Ok(true)), || format!("{key}: live, and swept: {cleared:?}"));
        }
    }
    report
}

/// Drops claims half-way: before they were polled, after one poll, and a little later.
pub async fn dropping<S: RetryTokens>(store: &S, prefix: &str) -> Report {
    let mut report = Report::default();
    let schedule = flat(Duration::from_millis(50));
    let key = |n| format!("{prefix}:dropping:{n}");
    for n in 0..30_u64 {
        let key = key(n);
        let claim = store.claim(&key, &schedule);
        match n % 3 {
            0 => drop(claim),
            1 => {
                let mut claim = pin!(claim);
                poll_fn(|cx| Poll::Ready(claim.as_mut().poll(cx).is_ready())).await;
            }
            _ => drop(timeout(Duration::from_micros(100 * n), claim).await),
        }
    }
    // Whatever had happened is over; what was in the way of it is done.
    sleep(Duration::from_millis(100)).await;
    for n in 0..30 {
        if let Some(grant) = granted(store, &key(n), &schedule, &mut report).await {
            report.expect(grant.streak <= 2, || format!("{}: streak {}", key(n), grant.streak));
        }
    }
    report
}
