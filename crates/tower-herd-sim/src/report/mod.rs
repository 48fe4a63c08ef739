//! What a run looks like to people and to programs.
//!
//! [`Row`] is the one line of figures with fixed keys, for this simulator and for anything else that
//! measures the same (a run over real sockets fills what it can and leaves the rest `null`).
//! [`table`] and [`extras`] print rows for a terminal, [`html`] draws runs into one self-contained page, [`picture`] into one image.

/// Appends formatted text to a string.
macro_rules! put {
    ($out:expr, $($text:tt)*) => {
        $out.push_str(&format!($($text)*))
    };
}

mod html;
mod picture;
mod row;
mod story;
mod svg;
mod table;
mod time;

pub use html::html;
pub use picture::picture;
pub use row::Row;
pub use table::{LEGEND, OUTAGE_LEGEND, extras, rungs, summary, table};
