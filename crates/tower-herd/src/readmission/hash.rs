//! Which tasks come back first: a number in [0, 1) of each task at each provider or scope.
//!
//! A task is readmitted once the share has grown past its number. The number depends on nothing but
//! the name and the affinity key, so every process readmits the same tasks without asking another, and
//! each task has its own instant, so there is no tick on which a crowd returns.
//!
//! It must not be the number by which a ladder chooses rungs: the tasks of a rung are those whose number
//! is high there, and a ramp by the same number would give the rung nearly none of its own until the end.
//! So both halves are salted before they are joined. Like the ladder's, the hash is the same in every
//! process and version.

use crate::{Key, random::mix};

const SALT: u64 = u64::from_be_bytes(*b"readmit\0");

/// The part that does not depend on the task: of `provider`, or of `provider/scope`.
pub(crate) fn place(name: &str) -> u64 {
    mix(Key::from(name).get() ^ SALT)
}

/// The number of a task there.
pub(crate) fn unit(place: u64, key: Key) -> f64 {
    let bits = mix(place ^ mix(key.get() ^ SALT));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    // Frozen: these figures may not change in any version, or a fleet of mixed versions readmits other
    // tasks in each of its processes.
    #[test]
    fn stable_across_versions() {
        assert_eq!(place("search"), FROZEN_PLACE);
        let first = [0, 1, 2, 3].map(|key: u64| unit(place("search"), key.into()));
        assert_eq!(first, FROZEN);
        assert_eq!(unit(place("search/model"), "task-7".into()), FROZEN_SCOPE);
    }
    const FROZEN_PLACE: u64 = 16744098248422441520;
    const FROZEN: [f64; 4] = [0.5675629688259544, 0.6105605112369085, 0.3387675447418488, 0.7420043969335522];
    const FROZEN_SCOPE: f64 = 0.45133609518620543;

    #[test]
    fn uniform_and_different_at_each_provider() {
        const KEYS: u64 = 40_000;
        let (here, there) = (place("a"), place("b"));
        let mut tenths = [0u64; 10];
        let mut both = 0;
        for key in 0..KEYS {
            let (u, v) = (unit(here, key.into()), unit(there, key.into()));
            assert!((0.0..1.0).contains(&u));
            tenths[(u * 10.0) as usize] += 1;
            both += u64::from(u < 0.1 && v < 0.1);
        }
        // Three standard deviations of a binomial: 180 of 4000, 60 of 400.
        assert!(tenths.iter().all(|n| n.abs_diff(KEYS / 10) < 200), "{tenths:?}");
        assert!(both.abs_diff(KEYS / 100) < 65, "{both}");
    }
}
