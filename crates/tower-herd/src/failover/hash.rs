//! Weighted rendezvous hashing: which rung of a tier a task goes to.
//!
//! Each rung gets a score from its name and the task's affinity key; the highest wins. No rung's
//! score depends on another rung, so when one leaves, only its own tasks move, and when it returns,
//! the same tasks come back. With the score `-weight / ln(u)`, `u` uniform in (0, 1), the share of
//! each rung is its weight over the sum of weights (Schindelhauer and Schomaker, "Weighted
//! distributed hash tables", SPAA 2005, the logarithmic method).
//!
//! The hash is XXH3 of the name, joined with the key by SplitMix64's finalizer. It is the same in
//! every process and version: changing it would move every task of a running fleet.

use crate::{Key, random::mix};

/// The part of the score that does not depend on the task.
pub(super) fn name_hash(name: &str) -> u64 {
    Key::from(name).get()
}

/// The score of a rung for a task; higher is better. Weights that are not positive lose to all others.
pub(super) fn score(name_hash: u64, weight: f64, key: Key) -> f64 {
    // Two rounds, so that keys which are small numbers in a row do not look alike.
    let bits = mix(name_hash ^ mix(key.get()));
    // 53 bits and a half: never 0, never 1.
    let u = ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    if weight > 0.0 { -weight / u.ln() } else { f64::NEG_INFINITY }
}

/// Indices of `rungs` (name hash, weight), best first for this key.
#[cfg(test)]
fn order(rungs: &[(u64, f64)], key: Key) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rungs.len()).collect();
    order.sort_by(|&a, &b| {
        score(rungs[b].0, rungs[b].1, key).total_cmp(&score(rungs[a].0, rungs[a].1, key)).then(a.cmp(&b))
    });
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rungs(weights: &[f64]) -> Vec<(u64, f64)> {
        weights.iter().enumerate().map(|(i, w)| (name_hash(&format!("rung-{i}")), *w)).collect()
    }

    // Frozen: these figures may not change in any version, or a fleet of mixed versions splits its tasks.
    #[test]
    fn stable_across_versions() {
        let three = rungs(&[1.0, 1.0, 1.0]);
        let first: Vec<usize> = (0..16).map(|key| order(&three, Key::from(key))[0]).collect();
        assert_eq!(first, FROZEN);
        assert_eq!(name_hash("rung-0"), FROZEN_NAME);
    }
    const FROZEN: [usize; 16] = [0, 1, 0, 2, 2, 2, 0, 0, 2, 0, 2, 1, 0, 2, 0, 2];
    const FROZEN_NAME: u64 = 8985022066680774808;

    #[test]
    fn shares_follow_weights() {
        let weighted = rungs(&[1.0, 2.0, 5.0]);
        let mut counts = [0u32; 3];
        for key in 0..80_000 {
            counts[order(&weighted, Key::from(key))[0]] += 1;
        }
        for (count, share) in counts.iter().zip([10_000, 20_000, 50_000]) {
            // three standard deviations of a binomial of this size are under 450
            assert!(count.abs_diff(share) < 450, "{counts:?}");
        }
    }

    #[test]
    fn a_rung_without_weight_gets_nothing() {
        let weighted = rungs(&[0.0, 1.0, -3.0, f64::NAN]);
        assert!((0..1000).all(|key| order(&weighted, Key::from(key))[0] == 1));
    }

    // Else the tasks of a recovering rung would come back first, or last, as a block.
    #[test]
    fn which_tasks_a_rung_gets_back_first_has_nothing_to_do_with_which_are_its() {
        use crate::readmission::hash::{place, unit};
        let three = rungs(&[1.0, 1.0, 1.0]);
        let place = place("rung-0");
        let (mut its, mut back) = (0u32, [0u32; 4]);
        for key in (0..60_000).filter(|key| order(&three, Key::from(*key))[0] == 0) {
            its += 1;
            for (n, share) in back.iter_mut().zip([0.05, 0.1, 0.5, 0.9]) {
                *n += u32::from(unit(place, Key::from(key)) < share);
            }
        }
        for (n, share) in back.iter().zip([0.05, 0.1, 0.5, 0.9]) {
            // Three standard deviations of a binomial of this size are under 220.
            assert!((f64::from(*n) - f64::from(its) * share).abs() < 220.0, "{back:?} of {its}");
        }
    }

    proptest! {
        #[test]
        fn when_a_rung_leaves_or_returns_only_its_tasks_move(
            weights in proptest::collection::vec(0.1f64..10.0, 2..8), gone: prop::sample::Index, key: u64,
        ) {
            let all = rungs(&weights);
            let gone = gone.index(all.len());
            let with = order(&all, Key::from(key));
            let without: Vec<usize> = with.iter().copied().filter(|i| *i != gone).collect();
            let mut rest = all.clone();
            rest.remove(gone);
            let moved: Vec<usize> =
                order(&rest, Key::from(key)).into_iter().map(|i| if i >= gone { i + 1 } else { i }).collect();
            prop_assert_eq!(without, moved);
        }

        #[test]
        fn more_weight_never_loses_a_task(weight in 0.1f64..10.0, more in 0.0f64..10.0, key: u64) {
            let name = name_hash("a");
            prop_assert!(score(name, weight + more, Key::from(key)) >= score(name, weight, Key::from(key)));
        }
    }
}
