//! Who should have how many: weighted max-min fairness, in integers.

/// One who asks for a part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) want: u64,
    pub(super) weight: u64,
    /// What it has now.
    pub(super) has: u64,
    /// Who has had less service for its weight comes first where it does not come out even.
    pub(super) pass: f64,
    /// Of equal ones, who was given something longest ago: the lowest version of a grant.
    pub(super) last: u64,
}

/// Who has the odd slot keeps it until it has had so much more service than the next, in slot-milliseconds:
/// else it would change hands with every exchange.
const TENURE: f64 = 250.0;

/// Shares `there` out. Nobody gets more than it wants; nobody who gets less than it wants has, for its weight,
/// less than another (but for one unit, where it does not come out even: that goes to the lowest pass, of
/// equal ones to who was given something longest ago, and then to the first in the slice).
pub(super) fn shares(there: u64, asks: &[Ask]) -> Vec<u64> {
    let mut given = vec![0; asks.len()];
    // By want for the weight: who wants least is served in full first.
    let mut order: Vec<usize> = (0..asks.len()).filter(|&i| asks[i].want > 0).collect();
    order.sort_by(|&a, &b| (asks[a].want * asks[b].weight).cmp(&(asks[b].want * asks[a].weight)));
    let mut left = there;
    let mut weights: u64 = order.iter().map(|&i| asks[i].weight).sum();
    let mut full = 0;
    for &i in &order {
        let Ask { want, weight, .. } = asks[i];
        if want * weights > left * weight {
            break;
        }
        given[i] = want;
        left -= want;
        weights -= weight;
        full += 1;
    }
    // All others want more than their part of what is left.
    let mut short = order.split_off(full);
    let part = left;
    for &i in &short {
        given[i] = part * asks[i].weight / weights;
        left -= given[i];
    }
    #[expect(clippy::cast_precision_loss, reason = "weights are small")]
    let turn = |i: usize| {
        let Ask { has, weight, pass, .. } = asks[i];
        if has > given[i] { pass - TENURE / weight as f64 } else { pass }
    };
    short.sort_by(|&a, &b| turn(a).total_cmp(&turn(b)).then(asks[a].last.cmp(&asks[b].last)).then(a.cmp(&b)));
    short.truncate(usize::try_from(left).unwrap_or(usize::MAX));
    for i in short {
        given[i] += 1;
    }
    given
}

#[cfg(test)]
mod tests {
    use super::{Ask, shares};
    use proptest::prelude::*;

    fn asks(wants: &[(u64, u64, f64)]) -> Vec<Ask> {
        wants.iter().map(|&(want, weight, pass)| Ask { want, weight, has: 0, pass, last: 0 }).collect()
    }

    #[test]
    fn small_ones_get_all_they_want_and_the_others_the_same() {
        assert_eq!(shares(12, &asks(&[(1, 1, 0.0), (20, 1, 0.0), (3, 1, 0.0), (20, 1, 0.0)])), [1, 4, 3, 4]);
        assert_eq!(shares(12, &asks(&[(20, 1, 0.0), (20, 3, 0.0)])), [3, 9]);
        assert_eq!(shares(0, &asks(&[(20, 1, 0.0)])), [0]);
        assert_eq!(shares(5, &[]), [0; 0]);
    }

    #[test]
    fn what_does_not_come_out_even_goes_to_who_had_least() {
        assert_eq!(shares(1, &asks(&[(5, 1, 7.0), (5, 1, 3.0), (5, 1, 3.0)])), [0, 1, 0]);
        assert_eq!(shares(3, &asks(&[(5, 1, 7.0), (5, 1, 3.0)])), [1, 2]);
    }

    #[test]
    fn the_odd_slot_does_not_change_hands_at_every_look() {
        let mut two = asks(&[(5, 1, 100.0), (5, 1, 0.0)]);
        two[0].has = 1;
        assert_eq!(shares(1, &two), [1, 0]);
        two[0].pass = 251.0;
        assert_eq!(shares(1, &two), [0, 1]);
    }

    proptest! {
        #[test]
        fn weighted_max_min(
            there in 0_u64..200,
            wants in proptest::collection::vec((0_u64..60, 1_u64..5, 0_u8..4), 0..12),
        ) {
            let asks: Vec<Ask> = wants.iter().map(|&(want, weight, pass)| Ask { want, weight, has: 0, pass: f64::from(pass), last: 0 }).collect();
            let given = shares(there, &asks);
            let wanted: u64 = asks.iter().map(|ask| ask.want).sum();
            prop_assert_eq!(given.iter().sum::<u64>(), there.min(wanted), "no slot is left while somebody wants it");
            for (i, a) in asks.iter().enumerate() {
                prop_assert!(given[i] <= a.want);
                for (j, b) in asks.iter().enumerate() {
                    // Who lacks some has, but for the unit that does not come out even, no less than any other.
                    if given[i] < a.want {
                        prop_assert!(
                            (given[i] + 1) * b.weight >= given[j].saturating_sub(1) * a.weight,
                            "{i} has {} and lacks, {j} has {}", given[i], given[j]
                        );
                    }
                }
            }
        }
    }
}
