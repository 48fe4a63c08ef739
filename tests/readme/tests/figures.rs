//! The table of the README against the simulator: what it says can be measured again.

use tower_herd_sim::{
    policy::Registry,
    report::Row,
    scenario::{Scenario, Settings, run},
};

/// The figure of a cell: `**20,821**`, `9 s` and `1.06 x` are numbers.
fn figure(cell: &str) -> Option<f64> {
    let number: String = cell.chars().filter(|c| c.is_ascii_digit() || *c == '.').collect();
    number.parse().ok()
}

/// The cells of the row whose first one names this policy.
fn cells(readme: &str, policy: &str) -> Vec<String> {
    let name = format!("`{policy}`");
    let line = readme.lines().find(|line| line.starts_with('|') && line.contains(&name));
    let line = line.unwrap_or_else(|| panic!("the README's table has no row for {name}"));
    line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}

#[test]
fn the_table_is_what_the_simulator_says() {
    let readme = include_str!("../../../README.md");
    let settings = Settings::new(Scenario::Stampede);
    let registry = Registry::standard();
    let made = |policy: &str| run(&settings, registry.get(policy).unwrap().as_ref(), 1).unwrap();
    let oracle = made("oracle").elapsed.as_secs_f64();

    for policy in ["naive", "jitter", "tower-herd", "oracle"] {
        let cells = cells(readme, policy);
        let row: Row = made(policy).row(Some(oracle));
        // Some room: rounded text, another machine's last bit, and a control that is still being tuned.
        let is = |cell: usize, measured: f64, room: f64| {
            let said = figure(&cells[cell]).unwrap_or_else(|| panic!("{policy}: `{}`", cells[cell]));
            assert!(
                (said - measured).abs() <= room,
                "{policy}: the README says {said}, the simulator {measured}; \
                 `tower-herd-sim stampede` prints the row: {row:?}"
            );
        };
        let lossy = if row.lost > 0 { 0.03 } else { 0.0 };
        is(1, row.done as f64, lossy * row.tasks as f64);
        is(2, row.lost as f64, lossy * row.tasks as f64);
        is(3, row.amplification.unwrap(), 0.001 + 3.0 * lossy);
        is(4, row.throttled.unwrap() as f64, 3.0 + lossy * 20_000.0);
        is(5, row.seconds, 1.0);
        match row.against_oracle() {
            Some(ratio) => is(6, ratio, 0.02),
            None => assert_eq!(cells[6], "", "{policy} lost tasks, and its time says nothing"),
        }
    }
}
