//! Tokens in the memory of one process.

use super::{Claim, Grant, HolderId, RetryTokens, Schedule, Token, Wait, WaitCause};
use crate::{
    Clock, Key, Time,
    random::{Random, Seeds},
};
use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    convert::Infallible,
    fmt,
    hash::{BuildHasherDefault, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

const SHARDS: usize = 16;

/// Tokens in the memory of **this process**: right for one process, and for no more than that. Two processes with a
/// `LocalTokens` each run every job twice as often as one. A handle: clones are the same tokens.
///
/// The clock is tokio's, so a test with a paused one moves it. Memory is bounded: by default 65,536 tokens, of about a
/// hundred bytes each. One too many takes the place of the one that has been open longest. Where all are
/// live, a key that is not known waits ([`WaitCause::Full`]): who is refused by a full table is safe, who passes one is
/// not. (A job's first attempt still runs: the layer sees to it.)
#[derive(Clone)]
pub struct LocalTokens(Arc<Shared>);

struct Shared {
    clock: Clock,
    shards: [Mutex<Shard>; SHARDS],
}

struct Shard {
    random: Random,
    limit: usize,
    tokens: HashMap<Key, Stored, BuildHasherDefault<Hashed>>,
    // By when they open, so that the oldest is found at once.
    order: BTreeSet<(Time, Key)>,
}

#[derive(Clone, Copy)]
struct Stored {
    not_before: Time,
    streak: u32,
    holder: HolderId,
}

/// A key is a hash already.
#[derive(Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = Key::from(bytes).get();
    }
    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

impl Default for LocalTokens {
    fn default() -> Self {
        Self::new()
    }
}

impl LocalTokens {
    /// At most 65,536 tokens.
    #[must_use]
    pub fn new() -> Self {
        Self::with_limit(65_536)
    }

    /// At most so many tokens, rounded up to a multiple of 16.
    #[must_use]
    pub fn with_limit(limit: usize) -> Self {
        Self::build(limit, &Seeds::from_entropy())
    }

    /// The same with a fixed seed, for tests: jitter and holders repeat.
    #[must_use]
    pub fn seeded(limit: usize, seed: u64) -> Self {
        Self::build(limit, &Seeds::from_seed(seed))
    }

    fn build(limit: usize, seeds: &Seeds) -> Self {
        let limit = limit.div_ceil(SHARDS).max(1);
        let shards = std::array::from_fn(|_| {
            Mutex::new(Shard {
                random: seeds.session(),
                limit,
                tokens: HashMap::default(),
                order: BTreeSet::new(),
            })
        });
        LocalTokens(Arc::new(Shared { clock: Clock::new(), shards }))
    }

    /// Tokens now, live and open.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.shards.iter().map(|shard| lock(shard).tokens.len()).sum()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn shard(&self, key: Key) -> MutexGuard<'_, Shard> {
        // The map below uses the lower bits.
        lock(&self.0.shards[(key.get() >> 60) as usize % SHARDS])
    }

    pub(crate) fn claim_now(&self, key: &str, schedule: &Schedule) -> Claim {
        let key = Key::from(key);
        let mut shard = self.shard(key);
        let now = self.0.clock.now();
        shard.claim(key, schedule, now)
    }

    pub(crate) fn extend_now(&self, key: &str, holder: HolderId, at_least: Duration) -> bool {
        let key = Key::from(key);
        let mut shard = self.shard(key);
        let until = self.0.clock.now().saturating_add(at_least);
        shard.held(key, holder).is_some_and(|stored| {
            if until > stored.not_before {
                shard.put(key, Stored { not_before: until, ..stored });
            }
            true
        })
    }

    pub(crate) fn clear_now(&self, key: &str, holder: HolderId) -> bool {
        let key = Key::from(key);
        let mut shard = self.shard(key);
        shard.held(key, holder).is_some_and(|_| shard.remove(key).is_some())
    }

    pub(crate) fn peek_now(&self, key: &str) -> Option<Token> {
        let key = Key::from(key);
        let stored = *self.shard(key).tokens.get(&key)?;
        let wait = stored.not_before.saturating_since(self.0.clock.now());
        Some(Token { holder: stored.holder, wait, streak: stored.streak })
    }

    pub(crate) fn sweep_now(&self, idle: Duration, limit: u32) -> u64 {
        let mut left = u64::from(limit);
        for shard in &self.0.shards {
            let mut shard = lock(shard);
            let now = self.0.clock.now();
            while left > 0 && shard.remove_oldest(|not_before| now.saturating_since(not_before) >= idle) {
                left -= 1;
            }
        }
        u64::from(limit) - left
    }

    /// What another store has told, so that this one knows it when the other is gone. Without a holder: of a run whose
    /// grant is not known; one that is known stays.
    pub(crate) fn note(&self, key: &str, holder: Option<HolderId>, wait: Duration, streak: u32) {
        let key = Key::from(key);
        let mut shard = self.shard(key);
        let now = self.0.clock.now();
        if shard.make_room(key, now) {
            let known =
                shard.tokens.get(&key).filter(|known| known.streak == streak).map(|known| known.holder);
            let holder = holder.or(known).unwrap_or_else(|| shard.random.bits().into());
            shard.put(key, Stored { not_before: now.saturating_add(wait), streak, holder });
        }
    }

    /// Another store does not know it.
    pub(crate) fn forget(&self, key: &str) {
        let key = Key::from(key);
        self.shard(key).remove(key);
    }
}

impl Shard {
    fn claim(&mut self, key: Key, schedule: &Schedule, now: Time) -> Claim {
        let streak = match self.tokens.get(&key).copied() {
            Some(token) if token.not_before > now => {
                return Claim::NotBefore(Wait {
                    wait: token.not_before.saturating_since(now),
                    streak: token.streak,
                    cause: WaitCause::Token,
                });
            }
            Some(token) => token.streak.saturating_add(1),
            None if self.make_room(key, now) => 1,
            None => {
                let first = self.order.first().map_or(now, |(not_before, _)| *not_before);
                let wait = first.saturating_since(now).max(Duration::from_millis(1));
                return Claim::NotBefore(Wait { wait, streak: 0, cause: WaitCause::Full });
            }
        };
        let next_in = schedule.window(streak, self.random.unit());
        let holder = HolderId::from(self.random.bits());
        self.put(key, Stored { not_before: now.saturating_add(next_in), streak, holder });
        Claim::Granted(Grant { holder, next_in, streak })
    }

    /// Whether there is room for a key that is not in it.
    fn make_room(&mut self, key: Key, now: Time) -> bool {
        self.tokens.len() < self.limit
            || self.tokens.contains_key(&key)
            || self.remove_oldest(|not_before| not_before <= now)
    }

    fn remove_oldest(&mut self, may_go: impl FnOnce(Time) -> bool) -> bool {
        match self.order.first().copied() {
            Some((not_before, key)) if may_go(not_before) => self.remove(key).is_some(),
            _ => false,
        }
    }

    fn held(&self, key: Key, holder: HolderId) -> Option<Stored> {
        self.tokens.get(&key).copied().filter(|stored| stored.holder == holder)
    }

    fn put(&mut self, key: Key, stored: Stored) {
        match self.tokens.entry(key) {
            Entry::Occupied(mut old) => {
                self.order.remove(&(old.get().not_before, key));
                old.insert(stored);
            }
            Entry::Vacant(new) => {
                new.insert(stored);
            }
        }
        self.order.insert((stored.not_before, key));
    }

    fn remove(&mut self, key: Key) -> Option<Stored> {
        let stored = self.tokens.remove(&key)?;
        self.order.remove(&(stored.not_before, key));
        Some(stored)
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RetryTokens for LocalTokens {
    type Error = Infallible;

    async fn claim(&self, key: &str, schedule: &Schedule) -> Result<Claim, Infallible> {
        Ok(self.claim_now(key, schedule))
    }

    async fn extend(&self, key: &str, holder: HolderId, at_least: Duration) -> Result<bool, Infallible> {
        Ok(self.extend_now(key, holder, at_least))
    }

    async fn clear(&self, key: &str, holder: HolderId) -> Result<bool, Infallible> {
        Ok(self.clear_now(key, holder))
    }

    async fn peek(&self, key: &str) -> Result<Option<Token>, Infallible> {
        Ok(self.peek_now(key))
    }

    async fn sweep(&self, idle: Duration, limit: u32) -> Result<u64, Infallible> {
        Ok(self.sweep_now(idle, limit))
    }

    fn local(&self) -> Option<&LocalTokens> {
        Some(self)
    }
}

impl fmt::Debug for LocalTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalTokens").field("len", &self.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn shard(limit: usize) -> Shard {
        let (tokens, order) = (HashMap::default(), BTreeSet::new());
        Shard { random: Seeds::from_seed(1).session(), limit, tokens, order }
    }

    fn schedule() -> Schedule {
        Schedule::new().growth(4 * SECOND, 2.0, 60 * SECOND).unwrap()
    }

    proptest! {
        /// The laws of a token, over any sequence of events of a few keys in a table that may be too small.
        #[test]
        fn never_early_fenced_counted_and_bounded(
            limit in 1_usize..6,
            steps in prop::collection::vec((0_u8..5, 0_u64..6, 0_u64..30, 0_usize..8), 1..200),
        ) {
            let (mut shard, mut now) = (shard(limit), Time::ZERO);
            // Of each key: not before, streak, newest holder. And all holders ever.
            let mut model: HashMap<u64, (Time, u32, HolderId)> = HashMap::new();
            let mut holders: Vec<(u64, HolderId)> = Vec::new();
            for (step, id, amount, pick) in steps {
                let key = Key::from(id);
                match step {
                    0 | 1 => match shard.claim(key, &schedule(), now) {
                        Claim::Granted(grant) => {
                            // A token that was open may have given way to another key.
                            let streak = match model.get(&id) {
                                Some((not_before, streak, _)) => {
                                    prop_assert!(*not_before <= now, "early");
                                    streak + 1
                                }
                                None => 1,
                            };
                            prop_assert!(grant.streak == streak);
                            prop_assert!(holders.iter().all(|(_, holder)| *holder != grant.holder));
                            let (least, most) = (schedule().delay(streak, 0.0), schedule().delay(streak, 1.0));
                            prop_assert!((least..=most).contains(&grant.next_in));
                            model.insert(id, (now.saturating_add(grant.next_in), streak, grant.holder));
                            holders.push((id, grant.holder));
                        }
                        Claim::NotBefore(wait) => {
                            prop_assert!(!wait.wait.is_zero());
                            match (wait.cause, model.get(&id)) {
                                (WaitCause::Token, Some((not_before, streak, _))) => {
                                    prop_assert_eq!(now.saturating_add(wait.wait), *not_before);
                                    prop_assert_eq!(wait.streak, *streak);
                                }
                                (WaitCause::Full, None) => {
                                    prop_assert!(shard.tokens.len() == limit);
                                    prop_assert!(model.values().all(|(not_before, ..)| *not_before > now));
                                }
                                other => prop_assert!(false, "{:?}", other),
                            }
                        }
                    },
                    2 if !holders.is_empty() => {
                        let (id, holder) = holders[pick % holders.len()];
                        let newest = model.get(&id).is_some_and(|(.., newest)| *newest == holder);
                        let held = shard.held(Key::from(id), holder).is_some();
                        prop_assert_eq!(held, newest);
                        if held {
                            shard.remove(Key::from(id));
                            model.remove(&id);
                        }
                    }
                    _ => now = now.saturating_add(SECOND * u32::try_from(amount).unwrap()),
                }
                prop_assert!(shard.tokens.len() <= limit && shard.order.len() == shard.tokens.len());
                // What gave way was open.
                model.retain(|id, (not_before, ..)| {
                    let kept = shard.tokens.contains_key(&Key::from(*id));
                    assert!(kept || *not_before <= now, "a live token gave way");
                    kept
                });
            }
        }
    }

    #[test]
    fn what_has_been_open_longest_gives_way_first() {
        let (mut shard, key) = (shard(3), |id: u64| Key::from(id));
        let flat = |seconds: u32| {
            Schedule::new().growth(SECOND * seconds, 1.0, SECOND * seconds).unwrap().jitter(0.0).unwrap()
        };
        for (id, seconds) in [(1, 30), (2, 10), (3, 20)] {
            shard.claim(key(id), &flat(seconds), Time::ZERO);
        }
        let now = Time::ZERO.saturating_add(25 * SECOND);
        assert!(matches!(shard.claim(key(4), &flat(60), now), Claim::Granted(_)));
        assert!(!shard.tokens.contains_key(&key(2)) && shard.tokens.contains_key(&key(3)));
        assert!(matches!(shard.claim(key(5), &flat(60), now), Claim::Granted(_)));
        let full = Wait { wait: 5 * SECOND, streak: 0, cause: WaitCause::Full };
        assert_eq!(shard.claim(key(6), &flat(60), now), Claim::NotBefore(full), "until the first opens");
    }

    /// Its own hasher takes a key as it is; text goes through the stable one.
    #[test]
    fn keys_are_spread_over_all_shards() {
        let store = LocalTokens::with_limit(1 << 14);
        for n in 0..4096 {
            store.claim_now(&format!("invoice:{n}"), &schedule());
        }
        assert_eq!(store.len(), 4096);
        let sizes: Vec<usize> = store.0.shards.iter().map(|shard| lock(shard).tokens.len()).collect();
        assert!(sizes.iter().all(|size| (150..400).contains(size)), "{sizes:?}");
        assert!(!store.is_empty() && LocalTokens::new().is_empty());
    }
}
