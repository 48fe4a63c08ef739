//! Seeded randomness: each session draws from its own generator.
//!
//! A generator that is cloned gives two sessions the same sequence, and with it the same waits
//! (tower's own backoff does this). So generators are never cloned here: a [`Seeds`] hands out a
//! fresh one a session. By default it starts from the operating system's randomness; a fixed seed
//! makes a run repeatable.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Hands out one generator a session, no two alike.
#[derive(Debug)]
pub struct Seeds(AtomicU64);

/// The generator of one session: not `Clone`, on purpose.
#[derive(Debug)]
pub struct Random(fastrand::Rng);

impl Default for Seeds {
    fn default() -> Self {
        Self::from_entropy()
    }
}

impl Seeds {
    /// Starts from the operating system's randomness.
    #[must_use]
    #[expect(clippy::disallowed_types, reason = "this one must differ in every process")]
    pub fn from_entropy() -> Self {
        // The keys of a `RandomState` are the standard library's only door to it.
        use std::hash::{BuildHasher, RandomState};
        Self::from_seed(RandomState::new().hash_one(0x7068_6572_6400_u64))
    }

    /// Starts from a fixed seed: the same seed gives the same generators in the same order.
    #[must_use]
    pub const fn from_seed(seed: u64) -> Self {
        Seeds(AtomicU64::new(seed))
    }

    /// The generator of a new session.
    #[must_use]
    pub fn session(&self) -> Random {
        // Weyl sequence through the finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection,
        // so no two sessions of one `Seeds` share a seed within 2^64 of them.
        let n = self.0.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        Random(fastrand::Rng::with_seed(mix(n)))
    }
}

impl Random {
    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        self.0.f64()
    }

    /// 64 uniform bits.
    pub fn bits(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// Uniform in `[0, most]`.
    pub fn up_to(&mut self, most: Duration) -> Duration {
        let nanos = u64::try_from(most.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.0.u64(0..=nanos))
    }
}

/// The finalizer of SplitMix64: a bijection of 64 bits in which every input bit reaches every output bit.
pub(crate) const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_differ_and_a_seed_repeats_them() {
        let draw = |seeds: &Seeds| {
            let mut random = seeds.session();
            (0..8).map(|_| random.up_to(Duration::from_secs(1))).collect::<Vec<_>>()
        };
        let seeds = Seeds::from_seed(7);
        let (first, second) = (draw(&seeds), draw(&seeds));
        assert_ne!(first, second);
        assert_eq!(first, draw(&Seeds::from_seed(7)));
        assert_ne!(draw(&Seeds::from_entropy()), draw(&Seeds::from_entropy()));
    }

    #[test]
    fn draws_stay_in_their_range() {
        let mut random = Seeds::from_seed(1).session();
        for _ in 0..1000 {
            assert!((0.0..1.0).contains(&random.unit()));
            assert!(random.up_to(Duration::from_nanos(3)) <= Duration::from_nanos(3));
        }
        assert_eq!(random.up_to(Duration::ZERO), Duration::ZERO);
        let _ = random.up_to(Duration::MAX);
    }
}
