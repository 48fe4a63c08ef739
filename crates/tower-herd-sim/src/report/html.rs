//! placeholder
use crate::scenario::Run;
use super::Row;
/// Page.
pub fn html(_runs: &[Run], _rows: &[Row]) -> String { String::new() }
