//! `docs/cases.md` names tests: each of them must exist, each report must stand in one of them, and each case
//! stands there once.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

#[test]
fn each_test_that_the_table_of_cases_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = std::fs::read_to_string(root.join("docs/cases.md")).unwrap();
    let mut files: HashMap<String, String> = HashMap::new();
    let mut named = 0;
    for (file, test) in table.split('`').skip(1).step_by(2).filter_map(|code| code.split_once("::")) {
        let path = match file.contains('/') {
            true => file.to_owned(),
            false => format!("crates/tower-herd/tests/{file}.rs"),
        };
        let text = files.entry(path).or_insert_with_key(|path| {
            std::fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
        });
        assert!(text.contains(&format!("fn {test}(")), "no test {test} in {file}");
        named += 1;
    }
    assert!(named > 100, "{named}");
}

#[test]
fn each_case_stands_in_the_table_once() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = std::fs::read_to_string(root.join("docs/cases.md")).unwrap();
    let mut seen = HashSet::new();
    let rows = table.lines().take_while(|line| *line != "## Vectors");
    for line in rows.filter(|line| line.starts_with("| ") && !line.starts_with("| case ")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        assert_eq!(cells.len(), 7, "{line}");
        assert!(cells[4..6].iter().all(|cell| !cell.is_empty()), "{line}");
        for case in cells[1].split(", ") {
            assert!(seen.insert(case), "{case} twice");
        }
    }
    assert!(seen.len() > 70, "{}", seen.len());
}

/// A row is worth its report only if somebody who reads the tests finds it there: in a test's name, in a line of
/// its table, or above it.
#[test]
fn each_report_stands_in_a_file_that_its_row_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let table = std::fs::read_to_string(root.join("docs/cases.md")).unwrap();
    let mut looked_for = 0;
    for line in table.lines().take_while(|line| *line != "## Vectors").filter(|line| line.contains("::")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let files = cells[5].split('`').skip(1).step_by(2).filter_map(|code| code.split_once("::"));
        let mut text = String::new();
        for (file, _) in files {
            let path = match file.contains('/') {
                true => file.to_owned(),
                false => format!("crates/tower-herd/tests/{file}.rs"),
            };
            text += &std::fs::read_to_string(root.join(path)).unwrap();
        }
        // A number ends where the next sign is no digit.
        let stands = |sign: char, number: &str| {
            text.match_indices(&format!("{sign}{number}")).any(|(at, found)| {
                text.get(at + found.len()..)
                    .is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_digit()))
            })
        };
        for (_, number) in cells[2].split(", ").filter_map(|report| report.split_once('#')) {
            assert!(stands('#', number) || stands('_', number), "#{number} in no test of {}", cells[1]);
            looked_for += 1;
        }
    }
    assert!(looked_for > 130, "{looked_for}");
}
