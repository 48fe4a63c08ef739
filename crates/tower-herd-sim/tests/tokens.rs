//! The test of token stores, put to the test: the store of this project in memory passes, and stores that are wrong
//! in the usual ways do not.

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::time::Instant;
use tower_herd::retry_token::{
    Claim, Grant, HolderId, LocalTokens, RetryTokens, Schedule, Token, Wait, WaitCause,
};
use tower_herd_sim::tokens::{self, Race, check, fresh_keys, race};

#[tokio::test(start_paused = true)]
async fn tokens_in_memory_pass() {
    let store = LocalTokens::new();
    check(&store, "check").await.assert_kept();
    let raced = race(&store, "race", Race::default()).await;
    raced.assert_exact();
    assert_eq!(raced.grants, 21);
}

/// Threads, and the real clock: only what a busy machine cannot spoil is asserted.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn tokens_in_memory_pass_under_contention() {
    let store = LocalTokens::new();
    let short = Race { length: Duration::from_secs(1), window: Duration::from_millis(50), ..Race::default() };
    race(&store, "race", short).await.assert_kept();
    fresh_keys(&store, "fresh", 100, 50).await.assert_kept();
}

/// What is wrong with a store.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// It reads, and then writes: both callers have read the same.
    SelectThenWrite,
    /// It tells losers a wait that is over.
    StaleWaits,
    /// Who held the token once may change it for ever.
    NoFence,
    /// It takes the wait of an extension, shorter or not.
    ExtendShortens,
    /// A refusal makes the streak grow.
    RefusalsCount,
    /// It sweeps what is live.
    SweepsAll,
}

/// When it opens, its streak, its holder.
type Row = (Instant, u32, HolderId);

/// As a database would hold them, with a wait for each statement.
#[derive(Clone)]
struct Wrong {
    fault: Fault,
    tokens: Arc<Mutex<HashMap<String, Row>>>,
}

impl Wrong {
    fn new(fault: Fault) -> Self {
        Wrong { fault, tokens: Arc::default() }
    }

    fn get(&self, key: &str) -> Option<Row> {
        self.tokens.lock().unwrap().get(key).copied()
    }

    fn claim_now(&self, key: &str, schedule: &Schedule, read: Option<Row>) -> Claim {
        let now = Instant::now();
        let streak = match read {
            Some((not_before, streak, holder)) if not_before > now => {
                if self.fault == Fault::RefusalsCount {
                    self.tokens.lock().unwrap().insert(key.into(), (not_before, streak + 1, holder));
                }
                let wait = if self.fault == Fault::StaleWaits { Duration::ZERO } else { not_before - now };
                return Claim::NotBefore(Wait { wait, streak, cause: WaitCause::Token });
            }
            Some((_, streak, _)) => streak + 1,
            None => 1,
        };
        let next_in = schedule.window(streak, 0.5);
        let mut tokens = self.tokens.lock().unwrap();
        let holder = HolderId::from(tokens.values().map(|(.., holder)| holder.get()).max().unwrap_or(0) + 1);
        tokens.insert(key.into(), (now + next_in, streak, holder));
        Claim::Granted(Grant { holder, next_in, streak })
    }

    fn holds(&self, key: &str, holder: HolderId) -> bool {
        self.get(key).is_some_and(|(.., held)| held == holder || self.fault == Fault::NoFence)
    }
}

impl RetryTokens for Wrong {
    type Error = Infallible;

    async fn claim(&self, key: &str, schedule: &Schedule) -> Result<Claim, Infallible> {
        if self.fault == Fault::SelectThenWrite {
            let read = self.get(key);
            tokio::task::yield_now().await;
            return Ok(self.claim_now(key, schedule, read));
        }
        tokio::task::yield_now().await;
        Ok(self.claim_now(key, schedule, self.get(key)))
    }

    async fn extend(&self, key: &str, holder: HolderId, at_least: Duration) -> Result<bool, Infallible> {
        if !self.holds(key, holder) {
            return Ok(false);
        }
        let (old, streak, holder) = self.get(key).unwrap();
        let mut until = Instant::now() + at_least.min(Duration::from_secs(1 << 30));
        if self.fault != Fault::ExtendShortens {
            until = until.max(old);
        }
        self.tokens.lock().unwrap().insert(key.into(), (until, streak, holder));
        Ok(true)
    }

    async fn clear(&self, key: &str, holder: HolderId) -> Result<bool, Infallible> {
        Ok(self.holds(key, holder) && self.tokens.lock().unwrap().remove(key).is_some())
    }

    async fn peek(&self, key: &str) -> Result<Option<Token>, Infallible> {
        Ok(self.get(key).map(|(not_before, streak, holder)| {
            let wait = not_before.saturating_duration_since(Instant::now());
            Token { holder, wait, streak }
        }))
    }

    async fn sweep(&self, idle: Duration, limit: u32) -> Result<u64, Infallible> {
        let mut tokens = self.tokens.lock().unwrap();
        let now = Instant::now();
        let open = |not_before: Instant| now.saturating_duration_since(not_before) >= idle;
        let mut old: Vec<String> = tokens
            .iter()
            .filter(|(_, (not_before, ..))| {
                self.fault == Fault::SweepsAll || *not_before <= now && open(*not_before)
            })
            .map(|(key, _)| key.clone())
            .collect();
        old.sort();
        old.truncate(limit as usize);
        Ok(old.iter().filter(|key| tokens.remove(*key).is_some()).count() as u64)
    }
}

/// The control of 100 callers on one key, and on fresh ones.
#[tokio::test(start_paused = true)]
async fn a_store_that_reads_and_then_writes_is_caught() {
    let raced = race(&Wrong::new(Fault::SelectThenWrite), "race", Race::default()).await;
    assert!(!raced.report.kept() && raced.grants > 10 * raced.possible, "{raced:?}");
    let fresh = fresh_keys(&Wrong::new(Fault::SelectThenWrite), "fresh", 10, 50).await;
    assert!(!fresh.kept(), "{fresh}");
}

#[tokio::test(start_paused = true)]
async fn other_faults_are_caught() {
    for (fault, word) in [
        (Fault::StaleWaits, "wait for nothing"),
        (Fault::NoFence, "stale holder"),
        (Fault::ExtendShortens, "closed for"),
        (Fault::RefusalsCount, "a refusal says streak"),
        (Fault::SweepsAll, "swept"),
    ] {
        let report = check(&Wrong::new(fault), "check").await;
        assert!(report.findings.iter().any(|finding| finding.contains(word)), "{word}: {report}");
    }
}

/// Without a fault it passes, so the faults are what is found.
#[tokio::test(start_paused = true)]
async fn the_same_store_without_a_fault_passes() {
    // Fresh keys never hold two tokens of one caller, so the read that is late finds nothing wrong elsewhere.
    let store = Wrong::new(Fault::SelectThenWrite);
    tokens::growth(&store, "a").await.assert_kept();
    tokens::fencing(&store, "a").await.assert_kept();
    tokens::extending(&store, "a").await.assert_kept();
    tokens::clearing(&store, "a").await.assert_kept();
    tokens::sweeping(&store, "a").await.assert_kept();
    tokens::dropping(&store, "a").await.assert_kept();
}
