//! The tables of a bench: Markdown, so that they go into a document as they are.

use comfy_table::{CellAlignment, Row, Table, presets};

/// A table of `rows` below `head`. Figures stand to the right; `words` are the columns that hold none.
pub(super) fn table<R: Into<Row>>(head: &[&str], words: &[usize], rows: impl IntoIterator<Item = R>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::ASCII_MARKDOWN).set_header(head).add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        if !words.contains(&index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
