alter table operator_act add column if not exists note text collate "C";
comment on column operator_act.note is 'A column that only the later release has.';
